# Every target sets itself up on a fresh machine: Python 3.11+, venv and pip are all it needs.
PYTHON ?= python3
VENV   := .venv
VERL   := .venv-verl
VLLM   := .venv-vllm
BIN    := $(VENV)/bin
OUTPUT ?= runs/first
SEED   ?= 0
export OMP_NUM_THREADS ?= 1
export RPG_VERL_PYTHON ?= $(CURDIR)/$(VERL)/bin/python

.PHONY: help train test test-vllm lint audit audit-page bench clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch -e .
	touch $@

$(VENV)/ready: $(VENV)/base
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(VERL)/ready: constraints-verl.txt   # verl cannot live beside trl, so it has an environment of its own
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install -q -c constraints-verl.txt torch verl
	touch $@

$(VLLM)/ready: constraints-vllm.txt   # vLLM wants an older transformers: see the list
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --no-deps -r constraints-vllm.txt -e .
	touch $@

train: $(VENV)/base            ## train the built-in model on the built-in task (OUTPUT=runs/first SEED=0)
	env -u OMP_NUM_THREADS $(BIN)/rpg train --output $(OUTPUT) --seed $(SEED)

lint: $(VENV)/ready            ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(VERL)/ready            ## lint, types and every test, the peers' real losses included
	$(BIN)/pytest -n 2

test-vllm: $(VLLM)/ready            ## the vLLM engine with a real vLLM on a CPU, runs of `rpg train` included (some minutes)
	$(VLLM)/bin/pytest tests/engine_vllm

audit: $(VENV)/ready $(VERL)/ready            ## every loss, and the real losses of TRL, Liger and verl, against the exact gradient
	$(BIN)/rpg audit --peers

audit-page: $(VENV)/ready $(VERL)/ready            ## the same over 40 problems, written into docs/ (some 15 minutes)
	$(BIN)/rpg audit --peers --seeds 40 --html docs/audit.html --svg docs/audit.svg --markdown docs/audit-table.md

bench: $(VENV)/ready            ## speed beside peers: every part on a GPU, the whole step on a CPU; and the loss beside one written by hand
	env -u OMP_NUM_THREADS $(BIN)/rpg bench
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/loss_overhead.py --repeats 60

clean:            ## remove the environments
	rm -rf $(VENV) $(VERL) $(VLLM)
