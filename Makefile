# Every target makes the project's own virtual environment first, if it is missing, out of date or broken.
#   make demo    PYTHON=python3.12      another interpreter
#   make test    ARGS="-k planner -x"   arguments for pytest (test) or Hydra overrides (demo)
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# The stamp is written last, so a half-finished install has none. An environment whose interpreter is gone, or that
# was built in another folder, has one that means nothing: drop it.
ifneq ($(shell $(PY) -I -c 'import importlib.util as u; print(*u.find_spec("lightning_pfo").submodule_search_locations)' 2>/dev/null),$(CURDIR)/lightning_pfo)
$(shell rm -f $(STAMP))
endif

.PHONY: help demo test lint format clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(STAMP) ## Train, profile, plan and apply on an emulated GPU (half a minute); results in outputs/demo
	$(PY) examples/gpt/train.py output_dir=outputs/demo $(ARGS)

test: $(STAMP) ## Run all tests, in two processes
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses 2 --dist loadfile $(ARGS)

lint: $(STAMP) ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## Repair style where a tool can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## Remove the environment, caches and the demo's results
	rm -rf $(VENV) build dist outputs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Most modules of the libraries are never imported, and not compiled. What a training imports is, once: where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would compile it again, for 8 s. So would those of
# the tests, hence `env -u` there; and two pytest processes with two threads each would spin on two cores.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV); this takes a minute or two ..."
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check --no-compile --editable '.[dev]' --constraint constraints.txt
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -c 'import lightning_pfo.hydra_app, lightning_pfo.experiment.run'
	@touch $@
