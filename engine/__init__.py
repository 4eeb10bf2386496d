"""Speech in, tokens out: the engine behind a small protocol. A leaf: it imports nothing else of Steno."""
