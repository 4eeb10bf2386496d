"""`python -m bench`: the same as `steno bench`."""

from bench.cli import app

app(prog_name="steno bench")
