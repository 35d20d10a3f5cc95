# Every target makes what it needs: on a fresh machine Python >= 3.10, pip and make are enough.
#   make demo ARGS='--transport tcp --layerwise'      make test PYTEST_ARGS='-k pull'      make PYTHON=python3.12 test

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
# A given PYTHON has an environment of its own; one that does not run is reported by the rule below.
VENV := .venv$(if $(filter-out file,$(origin PYTHON)),-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())'))
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-nixl check format lint types layers sizes bench bench-peers dist clean

help:
	@echo 'make demo       a real model, prefill and decode in two processes (ARGS=...)'
	@echo 'make test       the test suite, under 8 minutes on 2 cores (PYTEST_ARGS=...)'
	@echo 'make test-long  what needs longer: many rounds, slow links, large transfers'
	@echo 'make test-nixl  transport nixl with NIXL itself, a part of test-long (installs 69 MB)'
	@echo 'make check      format, lint, strict types, import layers, sizes'
	@echo 'make bench      one table: ours beside references (ARGS=...; see benchmarks/README.md)'
	@echo 'make bench-peers  the same with NIXL and Mooncake, installed in environments of their own'
	@echo 'make dist       wheel and source distribution in dist/'
	@echo 'PYTHON=python3.12 is any of these with that interpreter, in an environment of its own'

# A Python without ensurepip (Debian's without python3-venv) lends its own pip to the new environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo 'needs Python >= 3.10 (found: $(or $(PYTHON),none)); give one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

demo: $(VENV)/.demo $(if $(findstring nixl,$(ARGS)),$(VENV)/.nixl)
	$(BIN)/python -m examples.demo $(ARGS)

# Half of a test is waiting: three at a time keep two cores busy.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

# Without its torch. Where it cannot be installed the tests skip, with the reason.
$(VENV)/.nixl: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'nixl-cu12>=1.5' && touch $@ \
		|| echo 'NIXL cannot be installed here; its tests will skip'

test-long: $(VENV)/.dev $(VENV)/.nixl
	$(BIN)/python -m pytest -m slow --timeout 600 $(PYTEST_ARGS)

# What UCX says before it ends a process is seen, and nothing else of what it says.
test-nixl: $(VENV)/.dev $(VENV)/.nixl
	UCX_LOG_LEVEL=fatal NIXL_LOG_LEVEL=FATAL $(BIN)/python -m pytest -m slow --timeout 600 --capture=sys \
		tests/conformance/test_nixl.py $(wildcard tests/integration/test_nixl*.py) $(PYTEST_ARGS)

check: format lint types layers sizes

format: $(VENV)/.dev
	$(BIN)/python -m ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .

types: $(VENV)/.dev
	$(BIN)/python -m mypy

layers: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/api/test_layers.py

sizes: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/api/test_sizes.py

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.dev
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks $(ARGS)

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-* dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
