"""A live session as a pure machine: no clock, no tasks, no engine. `app.live` gives it those."""
