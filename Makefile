# Two commands do everything on a machine with Python and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

.PHONY: demo bench test test-full lint types clean

demo: $(RUNS)
	$(BIN)/erniekit demo

# Training speed next to other trainers (docs/performance.md); ARGS="--only A1 --peers hf" for a part of it.
bench: $(READY)
	$(BIN)/erniekit bench $(ARGS)

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not full and not cuda"

# Heavier sizes of the fault tests (their results: docs/faults.md), and every command of the docs.
test-full: lint types
	FAULT_TABLE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not cuda"

lint: $(READY)
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/codespell src tests docs README.md CONTRIBUTING.md CHANGELOG.md

types: $(READY)
	$(BIN)/mypy

# torch first and pinned: whatever else is installed then finds it in place and pulls no other build.
$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e ".[serve]"
	touch $@

$(READY): $(RUNS)
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) output vdl_log erniekit-demo .pytest_cache .mypy_cache .ruff_cache
