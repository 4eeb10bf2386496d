"""Sound before the engine: decode whatever FFmpeg can, and cut it into windows."""
