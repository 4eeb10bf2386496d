"""The wire: HTTP and server-sent events. It knows FastAPI; it knows no model."""
