# Every target makes the project's own virtual environment first, if it is missing, out of date or broken.
#   make demo    PYTHON=python3.12      another interpreter
#   make test    ARGS="-k planner -x"   arguments for pytest (test) or Hydra overrides (demo)
#   make test-torch TORCH=2.15.0        another torch than constraints.txt names, in an environment beside the first
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-torch-%)
ARGS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Files of tests go to the processes in the order of tests/conftest.py; xdist's own begins with those of many small tests.
# Three are more than two cores, because tests of several ranks wait for each other.
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 \
	$(PY) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The stamp is written last, so a half-finished install has none. An environment whose interpreter is gone, or that
# was built in another folder, has one that means nothing: drop it.
ifneq ($(shell $(PY) -I -c 'import importlib.util as u; print(*u.find_spec("lightning_pfo").submodule_search_locations)' 2>/dev/null),$(CURDIR)/lightning_pfo)
$(shell rm -f $(STAMP))
endif

# A torch asks for a sympy of its own.
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

.PHONY: help demo test test-slow test-torch lint format clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(STAMP) ## One training that measures, plans and verifies by itself, on emulated GPUs (30 seconds); results in outputs/demo
	$(PY) examples/gpt/train.py plan=auto output_dir=outputs/demo $(ARGS)

test: $(STAMP) ## Run the tests, in three processes; less than 10 minutes on two cores
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(STAMP) ## Run the others: more models, kinds of steps and loops
	$(PYTEST) -m slow $(ARGS)

test-torch: $(if $(TORCH),$(STAMP)) ## Run the tests of training with another torch: TORCH=2.15.0 (with CUDA libraries: 5 GB)
	@test -n '$(TORCH)' || { echo 'Name a version of torch: make test-torch TORCH=2.15.0'; exit 2; }
	$(PYTEST) tests/test_compat.py tests/strategy tests/loops $(ARGS)

lint: $(STAMP) ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## Repair style where a tool can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## Remove the environment, caches and the demo's results
	rm -rf $(VENV) .venv-torch-* build dist outputs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Most modules of the libraries are never imported, and not compiled. What a training imports is, once: where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would compile it again, for 8 s. So would those of
# the tests, hence `env -u` there; and pytest processes with two threads each would spin on two cores.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV); this takes a minute or two ..."
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/; /^sympy==/d' constraints.txt > $(PINS))
	@$(PY) -m pip install -qq --disable-pip-version-check --no-compile --editable '.[dev]' --constraint $(PINS)
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -c 'import lightning_pfo.hydra_app, lightning_pfo.experiment.run'
	@touch $@
