# make quickstart    install into .venv and train a small agent (about five minutes on two cores)
# make test          install into .venv and run every test
# make check         format, lint, types, import contracts
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test test-fast check format results clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $(STAMP)

quickstart: install
	$(BIN)/spear train quickstart

test: install check
	$(BIN)/python -m pytest

test-fast: install
	$(BIN)/python -m pytest -m 'not slow'

check: install
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
