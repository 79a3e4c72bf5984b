# Every target sets itself up on a fresh machine: Python 3.11+, venv and pip are all it needs.
PYTHON ?= python3
VENV   := .venv
VERL   := .venv-verl
VLLM   := .venv-vllm
VERLRUN := .venv-verl-vllm
DOCS   := .venv-docs
BIN    := $(VENV)/bin
SEED   ?= 0
export OMP_NUM_THREADS ?= 1
export RPG_VERL_PYTHON ?= $(CURDIR)/$(VERL)/bin/python
export RPG_DOCS_PYTHON ?= $(CURDIR)/$(DOCS)/bin/python

RESULTS := $(VENV)/results
# tests that need another environment than .venv
ELSEWHERE := engine_vllm trl_vllm engine_verl training_verl
SHELL := bash
.SHELLFLAGS := -o pipefail -c

ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:   # two targets would set up one environment at once; what can be done side by side asks for it below
endif

.PHONY: help train check check-core test test-rpg test-in-verl test-trl-vllm test-vllm test-verl lint audit audit-page bench docs docs-serve clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# constraints*.txt are whole lists but for what torch brings along on a machine with CUDA: torch first, then the list,
# which without dependencies needs no resolver. --no-compile leaves the bytecode of what nobody imports unmade.
define INSTALL
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install -q --no-compile -c $(2) torch
	$(1)/bin/pip install -q --no-compile --no-deps -r $(2) -e .
	touch $(1)/ready
endef

$(VENV)/base: pyproject.toml constraints.txt   # what `rpg train` needs, on any machine
	@echo "setting up $(VENV), once: torch, transformers and what they need from PyPI,"
	@echo "about 0.4 GB; 3 GB or more on Linux, where torch brings CUDA along"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --no-compile -c constraints.txt torch -e '.[train]' | sed -nE 's/^ *([A-Z][a-z ]+ [^ ]+ \([0-9.]+ [MG]B\)).*/  \1/p'
	@touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(call INSTALL,$(VENV),constraints.txt)
	touch $(VENV)/base

$(VERL)/ready: pyproject.toml constraints-verl.txt   # verl cannot live beside trl, so it has an environment of its own
	$(call INSTALL,$(VERL),constraints-verl.txt)

$(VLLM)/ready: pyproject.toml constraints-vllm.txt   # vLLM wants an older transformers: see the list
	$(call INSTALL,$(VLLM),constraints-vllm.txt)

$(VERLRUN)/ready: pyproject.toml constraints-verl-vllm.txt   # verl, with vLLM's CPU build for its rollouts
	$(call INSTALL,$(VERLRUN),constraints-verl-vllm.txt)

$(DOCS)/ready: constraints-docs.txt   # the documentation's generator: neither torch nor rpg
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -q --no-compile --no-deps -r constraints-docs.txt
	touch $@

train: $(VENV)/base            ## train the built-in model on the built-in task (SEED=0; OUTPUT=runs/mine, else the next free folder)
	@env -u OMP_NUM_THREADS $(BIN)/rpg train --seed $(SEED) $(if $(OUTPUT),--output $(OUTPUT))
	@command -v rpg > /dev/null || echo "rpg is in $(BIN): source $(BIN)/activate"

lint: $(VENV)/ready            ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The proofs of the losses, the order of the rooms, what the docs say, a run killed and resumed: what most changes can break.
CORE := tests/test_layers.py tests/loss tests/audit/test_audit.py tests/test_docs.py::test_what_a_page_says_is_so \
	"tests/run/test_kill.py::test_the_same_bits[adamw]"

check: $(VENV)/ready            ## two minutes: lint, types, and the tests of what must be exact
	@$(MAKE) --no-print-directory -j2 -Otarget lint check-core

check-core: $(VENV)/ready            ## the tests of `make check`
	$(BIN)/pytest -n 2 --dist worksteal $(CORE) --ignore tests/loss/test_mutations.py

# Two jobs at a time: environments beside one another and beside lint; then pytest on two cores; then the tests of the
# other two environments, side by side. After lint every part runs whatever the others say; its last line stands at the end.
test:            ## lint, types and every test; the peers' real losses, verl and TRL + vLLM included
	@rm -rf $(RESULTS)
	@$(MAKE) --no-print-directory -j2 -Otarget lint $(VERL)/ready $(VLLM)/ready $(DOCS)/ready
	@code=0; $(MAKE) --no-print-directory test-rpg || code=1; \
	$(MAKE) --no-print-directory -k -j2 -Otarget test-in-verl test-trl-vllm || code=1; \
	cd $(RESULTS) && for part in *; do printf '%-10s %s\n' $$part "$$(tail -n 1 $$part)"; done; exit $$code

test-rpg: $(VENV)/ready $(VERL)/ready $(DOCS)/ready            ## everything that runs in .venv
	@mkdir -p $(RESULTS)
	$(BIN)/pytest -n 2 --dist worksteal $(ELSEWHERE:%=--ignore tests/%) 2>&1 | tee $(RESULTS)/rpg

test-in-verl: $(VERL)/ready            ## the same losses inside verl's own engine
	@mkdir -p $(RESULTS)
	$(VERL)/bin/pytest -p no:cacheprovider tests/engine_verl tests/training_verl/test_verl_reference.py 2>&1 | tee $(RESULTS)/verl

test-trl-vllm: $(VLLM)/ready            ## a training with TRL and vLLM
	@mkdir -p $(RESULTS)
	$(VLLM)/bin/pytest -p no:cacheprovider tests/trl_vllm 2>&1 | tee $(RESULTS)/trl-vllm

test-vllm: $(VLLM)/ready            ## the vLLM engine with a real vLLM on a CPU, runs of `rpg train` included (some minutes)
	$(VLLM)/bin/pytest tests/engine_vllm

test-verl: $(VERLRUN)/ready            ## verl's own training with these losses on a CPU: Ray, FSDP2, vLLM (some minutes)
	$(VERLRUN)/bin/pytest -p no:cacheprovider tests/training_verl

audit: $(VENV)/ready $(VERL)/ready            ## every loss, and the real losses of TRL, Liger and verl, against the exact gradient
	$(BIN)/rpg audit --peers

audit-page: $(VENV)/ready $(VERL)/ready            ## the same over 40 problems, written into docs/ (some 15 minutes)
	$(BIN)/rpg audit --peers --seeds 40 --html docs/audit.html --svg docs/audit.svg --markdown docs/audit-table.md

bench: $(VENV)/ready            ## speed beside peers: every part on a GPU, the whole step on a CPU; and the loss beside one written by hand
	env -u OMP_NUM_THREADS $(BIN)/rpg bench
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/loss_overhead.py --repeats 60

docs: $(DOCS)/ready            ## the documentation site, into site/html; a dead link or any warning fails
	$(DOCS)/bin/python scripts/site/build.py

docs-serve: $(DOCS)/ready            ## the same at localhost:8000, built again when something is written
	$(DOCS)/bin/python scripts/site/build.py --serve

clean:            ## remove the environments, and the documentation site
	rm -rf $(VENV) $(VERL) $(VLLM) $(VERLRUN) $(DOCS) site
