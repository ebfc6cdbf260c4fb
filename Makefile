# Two commands do everything on a machine with Python and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
COMPILED := $(VENV)/.compiled
READY := $(VENV)/.ready
OURS := $(VENV)/.made-by-make
# pip compiles to bytecode on one core, more than half of its time; COMPILE does on all of them. Some packages hold files
# for other versions of Python, which do not compile.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

.PHONY: demo bench wheel docs test bytecode test-full lint types clean

demo: $(COMPILED)
	$(BIN)/erniekit demo

# Training speed next to other trainers (docs/performance.md); ARGS="--only A1 --peers hf" for a part of it.
bench: $(READY)
	$(BIN)/erniekit bench $(ARGS)

# dist/: the source distribution, and the wheel built from it alone. tests/e2e/test_wheel.py installs it in a bare
# environment, runs the demo and uninstalls.
wheel: $(READY)
	$(BIN)/python -m build --no-isolation --outdir dist .

# site/: docs/ as a site with search, in English and Chinese; a link that leads nowhere stops it.
docs: $(RUNS)
	$(PIP) -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Hundreds of tests start processes: without bytecode each would compile all of erniekit again, a second of processor.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
TEST := $(PYTEST) -n 2 --dist loadgroup
USUAL := -m "not full and not cuda"
# Tests wait for processes and time limits: the type checker has what they leave of the processors, and says its part
# after theirs.
TYPED := $(VENV)/.types
WITH_TYPES = nice -n 19 $(BIN)/mypy >$(TYPED) 2>&1 & types=$$!; $(1); tests=$$?; \
	wait $$types; typed=$$?; cat $(TYPED); test $$tests = 0 && test $$typed = 0

test: lint
	$(call WITH_TYPES,$(TEST) $(USUAL))

# What each of pytest's workers would compile on its own, for CI.
OTHERS := $(filter-out tests/unit/ tests/support/,$(wildcard tests/*/))
bytecode: $(READY)
	$(PYTEST) --collect-only -q $(USUAL) tests/unit >/dev/null & unit=$$!; \
	$(PYTEST) --collect-only -q $(USUAL) $(OTHERS) >/dev/null && wait $$unit

# Heavier sizes of the fault tests (their results: docs/faults.md), every command of the docs, and GGUF files in
# llama.cpp: the first run builds it (cmake, a C++ compiler, some minutes) into build/llama-cpp.
# ERNIEKIT_TORCHES=/a/bin/python:/b/bin/python also trains with their versions of torch (docs/adding-a-device.md).
test-full: lint
	$(call WITH_TYPES,FAULT_TABLE=1 $(TEST) -m "not cuda")

lint: $(READY)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/codespell src tests docs README.md CONTRIBUTING.md CHANGELOG.md

types: $(READY)
	$(BIN)/mypy

# torch first and pinned: whatever else is installed then finds it in place and pulls no other build.
$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && touch $(OURS); }
	$(PIP) $(TORCH)
	$(BIN)/python -m pip uninstall --quiet --yes erniekit 2>/dev/null  # the name this project had, and another one has
	$(PIP) -c constraints.txt -e ".[serve]"
	touch $@

$(COMPILED): $(RUNS)
	$(COMPILE)
	touch $@

# pip has one core: what is there already is compiled beside it.
$(READY): $(RUNS)
	{ $(COMPILE); } & $(PIP) -c constraints.txt -e ".[dev]"; installed=$$?; wait; test $$installed = 0
	$(COMPILE)
	touch $(COMPILED) $@

# Only what make made: environment and caches. Runs, demos and logs are the user's.
clean:
	if test -e $(OURS); then rm -rf $(VENV); else rm -f $(RUNS) $(COMPILED) $(READY); fi
	rm -rf .pytest_cache .mypy_cache .ruff_cache
