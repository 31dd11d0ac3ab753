# make quickstart: a language model trained on this Python's own sources, on 4 local ranks.
# make check:      what to run while you work: lint, types, short tests.
# make test:       lint, types and tests.
# make gpu-report: how it does on a GPU. All do their own set-up and need nothing run before.

PYTHON ?= python3
VENV ?= .venv
# The newest release that passes the tests and is to be had as a build for CPUs. On a GPU machine name your build, for example:
#   make quickstart TORCH="torch==2.11.0 --index-url <your wheel index>"
TORCH ?= torch==2.13.0
RANKS ?= 4
OUT ?= runs/quickstart
PYTEST_ARGS ?=
REPORT_ARGS ?=
NOX_ARGS ?=

BIN := $(VENV)/bin
# Tests start hundreds of processes: they find megazero compiled, also where the environment says not to keep that.
export PYTHONDONTWRITEBYTECODE :=
# The stamp names the requirement, so that another TORCH is installed over the first.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

.PHONY: quickstart check check-unit check-dist test test-unit test-dist test-netlab test-slow test-releases slurm-test bench gpu-report docs lint clean
# Stages come one after another whatever -j says; make test itself asks for the first two together.
ifndef TOGETHER
.NOTPARALLEL:
endif

$(TORCH_STAMP):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "megazero needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	$(BIN)/pip install --quiet $(TORCH)
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.base: $(TORCH_STAMP) setup.cfg pyproject.toml
	@echo "installing megazero"
	$(BIN)/pip install --quiet --editable '.'
	@touch $@

# megatron-core is the oracle for the data format and the schedules; without its own dependencies, which the
# parts compared here do not need.
$(VENV)/.test: $(VENV)/.base
	@echo "installing what the tests need"
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps megatron-core==0.16.1
	@touch $@

quickstart: $(VENV)/.base
	$(BIN)/python pretrain/quickstart.py --out $(OUT) --ranks $(RANKS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In stages, the fastest first, each of which stops the rest; alone, too: make test-unit. mypy has one core of two, so
# tests begin beside it. Ranks wait for each other often, so it takes three workers to keep two cores busy there. What
# measures links runs alone. What PYTEST_ARGS select may be in one of the stages alone: the others' "no tests" (5) is no
# failure then.
NONE_SELECTED = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])
PARALLEL := --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"
test: $(VENV)/.test
	$(MAKE) --no-print-directory --jobs 2 TOGETHER=1 lint test-unit
	$(MAKE) --no-print-directory test-dist
	$(MAKE) --no-print-directory test-netlab

test-unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(PARALLEL) --ignore tests/dist --ignore tests/megatron --ignore tests/fsdp2 --ignore tests/netlab $(PYTEST_ARGS) $(NONE_SELECTED)

test-dist: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 $(PARALLEL) --ignore tests/unit --ignore tests/gpu --ignore tests/netlab $(PYTEST_ARGS) $(NONE_SELECTED)

test-netlab: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" tests/netlab $(PYTEST_ARGS) $(NONE_SELECTED)

# The inner loop, 3 minutes at most: without tests of pages and those that take seconds, and of several ranks one small
# cover for each subject.
COVERS := \
    tests/dist/checkpoint/test_store.py \
    "tests/dist/engine/test_parity.py::test_cover[few steps-2]" \
    tests/dist/failures/test_failing_ranks.py::test_a_mistake_of_all_ranks_is_said_once \
    "tests/dist/models/test_tp.py::test_decoder_equals_one_rank[2-sequence]" \
    "tests/dist/outer/test_outer.py::test_ranks_take_the_steps_of_diloco[core]" \
    "tests/dist/pipeline/test_parity.py::test_cover[2]" \
    tests/dist/quantised/test_quantised.py::test_any_size \
    tests/dist/checkpoint/test_resume.py::test_hpz_equals_zero3_bit_for_bit \
    "tests/dist/verify/test_verify.py::test_a_fault_is_seen_and_named[stale-secondary]" \
    tests/fsdp2/test_patch.py::test_it_is_evaluated_in_inference_mode
check: $(VENV)/.test
	$(MAKE) --no-print-directory --jobs 2 TOGETHER=1 lint check-unit
	$(MAKE) --no-print-directory check-dist

check-unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not long" tests/unit \
	    --ignore tests/unit/house --ignore tests/unit/benchmarks --ignore tests/unit/pretrain

check-dist: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(COVERS)

# The full parity products and other long runs: some three hours on 2 cores. What measures links, and SLURM, runs alone.
test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 -m slow --ignore tests/netlab --ignore tests/slurm $(PYTEST_ARGS) $(NONE_SELECTED)
	$(BIN)/python -m pytest -m slow tests/netlab tests/slurm $(PYTEST_ARGS) $(NONE_SELECTED)

# A real SLURM on this machine (some minutes, as root). Without slurm-wlm and munge it says what to install.
slurm-test: $(VENV)/.test
	$(BIN)/python -m pytest -m slow -rs tests/slurm $(PYTEST_ARGS)

# The tests under the oldest and newest releases of Python, torch, transformers and megatron-core (noxfile.py: some 20 GB,
# two hours). For example NOX_ARGS="-s tests-3.13 wheel".
test-releases:
	$(PYTHON) -m venv .nox/own
	.nox/own/bin/pip install --quiet nox
	.nox/own/bin/nox $(NOX_ARGS)

bench: $(VENV)/.test
	$(BIN)/python benchmarks/step_time.py

# Everything that needs a GPU, in at most 8 minutes on one card, into runs/gpu-report; without a card a rehearsal. For
# example REPORT_ARGS="--pieces kernels,race --fresh".
gpu-report: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu_report $(REPORT_ARGS)

# The documents as a site, into site/. A dead link or anchor fails.
docs: $(VENV)/.base
	$(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info
