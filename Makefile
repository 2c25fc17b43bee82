# Everything sets itself up: `make serve`, `make test`, `make check`, `make bench` each install what they need first.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install install-dev serve test test-all test-fast check format bench clean

help:
	@echo "make serve      start the gateway with the demo model on http://127.0.0.1:8080"
	@echo "make test       run the tests             make test-fast   leave out slow and model tests"
	@echo "make test-all   also those of minutes: every combination, perplexity, a second real model"
	@echo "make check      lint, types, import rules, docs"
	@echo "make bench      benchmarks (quiet machine)  make format      apply the formatter"

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Tidegate needs Python 3.11 or newer on the PATH."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	@echo "Installing Tidegate and its engine into $(VENV) (once; torch is the large part) ..."
	$(PIP) install -qq $(CONSTRAINTS) -e '.[backend]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	$(PIP) install -qq $(CONSTRAINTS) -e '.[backend,dev]'
	@touch $@ $(VENV)/.installed

serve: install
	@exec $(BIN)/tidegate serve --config config.toml $(ARGS)

test: install-dev
	$(BIN)/python -m pytest -m "not exhaustive" $(ARGS)

test-all: install-dev
	$(BIN)/python -m pytest $(ARGS)

test-fast: install-dev
	$(BIN)/python -m pytest -m "not slow and not model and not exhaustive" $(ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_layout.py tests/test_docs.py

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev
	$(BIN)/python bench/run.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist
