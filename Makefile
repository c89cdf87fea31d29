# Two commands for a fresh machine: `make demo` and `make test`. Both make .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all docs bench lint format clean

demo: $(READY)
	$(BIN)/lpbnn demo

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# With the tests marked slow, each of which a quicker one of `make test` covers in part, and with
# new random examples of the tests that draw theirs.
test-all: $(READY) lint
	HYPOTHESIS_PROFILE=default $(BIN)/python -m pytest -n 2 --dist worksteal

# The documentation site in site/: open site/index.html. Warnings, broken links among them, are errors.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict

# For example: make bench ARGS="deeplab --mode eager"; `python -m benchmarks --help` lists the rest.
ARGS ?= networks --backbone wrn-16-4 --members 4 --mode eager
bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installed again only when what is to be installed changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"lpbnn needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv .pytest_cache .ruff_cache site
