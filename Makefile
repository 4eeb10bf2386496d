# `make` lists the targets. ARGS go to the program that a target runs: make test ARGS="-k health".
PYTHON ?= python3
SETUP = $(PYTHON) scripts/setup.py

.DEFAULT_GOAL := help
.PHONY: help setup serve test fast check format table lock soak fuzz clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  \1\t/' | expand -t 12

setup:  ## install everything into .venv; DEV=1 adds what the tests need
	@$(SETUP) $(if $(DEV),--dev)

serve: setup  ## install and serve on this machine
	@.venv/bin/steno serve $(ARGS)

test: DEV = 1
test: setup  ## install and run every test, the real engine's too
	@.venv/bin/pytest $(ARGS)

fast: DEV = 1
fast: setup  ## the tests without the real engine
	@.venv/bin/pytest -m "not real" -n auto --dist loadfile $(ARGS)

check: DEV = 1
check: setup  ## lint, formatting, types, and the layers of the architecture
	@rc=0; \
	for tool in "ruff check" "ruff format --check" "mypy" "lint-imports"; do \
	    echo "== $$tool"; .venv/bin/$$tool || rc=1; \
	done; exit $$rc

format: DEV = 1
format: setup  ## format the code and mend what ruff can
	@.venv/bin/ruff check --fix-only .
	@.venv/bin/ruff format .

table:  ## write the live session's table into ARCHITECTURE.md
	@.venv/bin/python scripts/session_table.py

lock:  ## renew the constraints files after pyproject.toml changed; ARGS=--upgrade takes the newest versions
	@$(SETUP) --lock $(ARGS)

soak: setup  ## serve all kinds of clients for 30 minutes, kill the engine, see what is lost or grows; ARGS="--minutes 240"
	@.venv/bin/python scripts/soak.py $(ARGS)

fuzz: DEV = 1
fuzz: setup  ## send made-up requests and audio for ten minutes; MINUTES=60 for longer
	@STENO_FUZZ_MINUTES=$(or $(MINUTES),10) .venv/bin/pytest -s tests/test_fuzz.py $(ARGS)

clean:  ## remove .venv and what tools left behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
