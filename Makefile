# Everything here runs in a virtual environment of its own, .venv, made on first use and redone when pyproject.toml or
# constraints.txt change. Nothing is installed outside it. `make PYTHON=python3.12 demo` picks another Python.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check --retries 10 --constraint constraints.txt
# Neighbours go to one worker: what the tests of a file share is made once.
PYTEST_FLAGS ?= -n auto --dist worksteal
SLOW ?= slow
MERGEKIT ?= .venv-mergekit/bin/python
BENCH_FLAGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: fuzz help demo test test-slow soak lint types docs reference bench clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 17

demo: $(VENV)/installed  ## Build the three merges of Mergefile.toml
	$(VENV)/bin/mergepipe build

test: $(VENV)/installed-dev  ## Run the tests, the slow ones left out
	$(RUN) pytest $(PYTEST_FLAGS)

test-slow: $(VENV)/installed-dev  ## Run the slow tests
	$(RUN) pytest $(PYTEST_FLAGS) -m '$(SLOW)'

fuzz: $(VENV)/installed-dev  ## Feed damaged files to everything that reads them, for a minute each
	$(RUN) tests.fuzz --seconds 60

soak: $(VENV)/installed-dev  ## Kill builds at 200 random moments, and check that nothing is lost
	PYTHONPATH=tests $(RUN) support.soak

lint: $(VENV)/installed-dev  ## Check the style with ruff
	$(RUN) ruff check .

types: $(VENV)/installed-dev  ## Check the types with mypy
	$(RUN) mypy

docs: $(VENV)/installed-docs  ## Build the site of docs/ into build/site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

reference: $(VENV)/installed  ## Write docs/reference/operators.md from the operators
	$(RUN) mergepipe.operators.reference >docs/reference/operators.md.new
	mv docs/reference/operators.md.new docs/reference/operators.md

bench: $(VENV)/installed-dev $(if $(filter .venv-mergekit/%,$(MERGEKIT)),.venv-mergekit/installed)  ## Measure next to mergekit
	$(RUN) benchmarks speed --mergekit $(MERGEKIT) $(BENCH_FLAGS)

clean:  ## Remove what was built, the cache and the tools' caches; .venv stays
	rm -rf build dist .mergecache .hypothesis .mypy_cache .pytest_cache .ruff_cache mergepipe.egg-info
	find mergepipe tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --- the environment --------------------------------------------------------------------------------------------------

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { \
	    echo 'error: there is no `$(PYTHON)` on this machine; mergepipe needs Python 3.11 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: mergepipe needs Python 3.11 or newer, and \`$(PYTHON)\` is $$($(PYTHON) -V 2>&1)" >&2; \
	    echo 'hint: name a newer one, for example `make PYTHON=python3.12 demo`' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	    echo 'error: `$(PYTHON) -m venv` cannot make a virtual environment' >&2; \
	    echo 'hint: on Debian and Ubuntu, install the package python3-venv' >&2; exit 1; }
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/created
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/created
	$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed $(VENV)/installed-docs $@

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(VENV)/created
	$(PIP) --editable '.[docs]'
	@touch $(VENV)/installed $@

# mergekit, for the benchmark alone; nothing here depends on it.
.venv-mergekit/installed: $(wildcard benchmarks/mergekit.txt) | $(VENV)/created
	$(PYTHON) -m venv .venv-mergekit
	.venv-mergekit/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 --requirement benchmarks/mergekit.txt
	@touch $@
