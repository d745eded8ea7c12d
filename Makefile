PYTHON ?= python3
VENV := .venv
OLDEST := .oldest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Two test workers on two cores: more threads would only make them wait for each other.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help demo test lint gpu
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/'

demo: $(VENV)/.installed  ## set up, then watch the embedded pair write: plain generate against EAGLE
	@$(BIN)/eagle31 demo

test: lint $(OLDEST)/.installed  ## every check: lint, all tests, the contract tests on the oldest transformers
	$(TEST)
	@PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers as t; print('oldest supported: transformers', t.__version__)"
	PYTHONPATH=$(OLDEST) $(TEST) -m contract

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu: $(VENV)/.installed-dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no environment: $(PYTHON) needs its venv module" >&2; exit 1; }

# Stamps: installing again costs nothing until a requirement changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e ".[dev,bnb,train,bench]"
	@touch $@ $(VENV)/.installed

# Only transformers is swapped: torch and the rest stay those of the main environment.
$(OLDEST)/.installed: constraints-oldest.txt | $(VENV)/.installed-dev
	rm -rf $(OLDEST)
	$(PIP) --target $(OLDEST) --no-deps -r constraints-oldest.txt
	@touch $@
