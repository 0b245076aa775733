# make quickstart   install, then plan, train, export and serve a real model in front of your eyes
# make test         what a contributor runs: lint, types and tests (under ten minutes on two cores)
# make test-all     everything, the slow tests and the quick start too
# make test-long    more layouts, peaks and faults than fit into an hour
# make kill-test    kill a training twenty times, at random moments; it must lose nothing
# make soak         ask a server ten thousand times, in every way; each answer must be right
# make mutants      put known faults of distributed training into the source; each must be caught

PYTHON ?= python3
VENV ?= .venv
# tests that run at a time; most of their time is waiting for processes to start
WORKERS ?= 2
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-all test-long kill-test soak mutants lint format types unit install clean

quickstart: install
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/quickstart.sh

test: lint types unit

unit: install
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not long"

test-all: install
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not long"
	$(MAKE) quickstart

test-long: install
	$(BIN)/python -m pytest -m "long"

kill-test: install
	NUM_KILLS=20 $(BIN)/python -m pytest -s tests/e2e/test_kill.py

soak: install
	NUM_REQUESTS=10000 $(BIN)/python -m pytest -s tests/e2e/test_soak.py

mutants: install
	$(BIN)/python -m tests.mutants.run

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Shardwise needs Python 3.11 or newer; give one with: make PYTHON=python3.11 ...")'
	@echo "installing into $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) quickstart-output .mypy_cache .ruff_cache .pytest_cache
