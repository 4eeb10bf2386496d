"""The gateway: use cases, values, settings, commands."""
