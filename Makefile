# hf_lowprec: `make` lists the targets. Needs Python 3.10 or newer and no C compiler.
PYTHON  ?= python3
# Of pytest: one more than CI has cores, since many tests wait for processes that they have started.
WORKERS ?= 3
ARGS    ?=
PINS    ?= -c constraints.txt

DEEPSPEED := deepspeed einops hjson msgpack ninja py-cpuinfo

BIN   := .venv/bin
STAMP := .venv/.installed
CODE  := hf_lowprec tests $(wildcard examples benchmarks tools docs)

.DEFAULT_GOAL := help
.PHONY: help .venv drawings demo test test-all test-deepspeed test-fast test-oldest test-gpu test-hosts mutants pytest lint format format-check typecheck docs docs-serve evidence bench bench-gpu report-gpu dist test-dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter of a new .venv, ARGS='...' is handed to demo, bench and the tests."

.venv: $(STAMP) ## the environment: this package with every extra, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo "make: no '$(PYTHON)' here; name a Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: hf_lowprec needs Python 3.10 or newer, and '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1);" \
	         "try make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: '$(PYTHON)' has no venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing hf_lowprec and its tools into .venv (torch included, so the first time takes minutes) ..."
	@$(BIN)/python -c '' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[all]'
	@touch $@
	@echo "Ready: $$($(BIN)/python -V), torch $$($(BIN)/python -c 'import torch; print(torch.__version__)')"

demo: $(STAMP) ## what pure BF16 loses and what this package gives back, in a few minutes on a CPU
	@$(BIN)/python examples/demo.py $(ARGS)

drawings: $(STAMP) ## the drawings of the documentation, into docs/images
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=. $(BIN)/python docs/drawings $(ARGS)

test: lint format-check ## everything CI checks
	@$(MAKE) --no-print-directory -j 2 typecheck pytest
	@$(MAKE) --no-print-directory test-deepspeed

# Tests start processes by the dozen, which need not compile this package's modules again, whatever the environment says.
pytest: $(STAMP) ## the tests alone
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Beside .venv, because accelerate imports DeepSpeed wherever it is, and takes a second for it in every process.
.deepspeed/.installed: constraints.txt $(STAMP)
	@rm -rf .deepspeed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) --no-deps --target .deepspeed $(DEEPSPEED)
	@touch $@

test-deepspeed: .deepspeed/.installed ## the tests that need DeepSpeed, which is installed for them alone
	PYTHONPATH=$(CURDIR)/.deepspeed PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  tests/deepspeed $(ARGS)

test-all: export HF_LOWPREC_EVERY_CASE = 1
test-all: pytest ## the tests with all of their cases: takes several times as long

test-fast: $(STAMP) ## the tests that take moments: not slow, no worker processes, no GPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  -m "not slow and not distributed and not gpu" $(ARGS)

# Without the tests of single models of transformers, which are newer than its oldest version here.
test-oldest: ## the tests of what trains, in .venv-oldest, at the oldest versions that pyproject.toml allows
	@test -x .venv-oldest/bin/python || "$(PYTHON)" -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
	  -e '.[trainer,test,bench]' datasets peft pillow scipy
	.venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not distributed and not gpu" \
	  tests/rounding tests/optim tests/reduction tests/monitor tests/casting tests/integrations tests/test_torch_alone.py \
	  $(addprefix --ignore=tests/casting/test_,contrastive.py every_architecture.py numbers_of_transformers.py) \
	  $(ARGS)

# Where a GPU is, an environment often is too: without .venv the interpreter PYTHON is used as it is.
test-gpu: ## the step's tests on the GPU of this machine
	PYTHONPATH=. HF_LOWPREC_EVERY_CASE=1 $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -o minversion=8.0 \
	  tests/gpu tests/optim -k "not native" $(ARGS)

test-hosts: $(STAMP) ## train with programs that build on this package, each in an environment of its own
	$(BIN)/python -m tests.hosts $(ARGS)

mutants: .deepspeed/.installed ## plant faults in copies of the package: the tests must notice each
	@PYTHONPATH=$(CURDIR)/.deepspeed $(BIN)/python -m tools.mutants $(ARGS)

lint: $(STAMP) ## ruff's rules
	@$(BIN)/ruff check $(CODE)

format-check: $(STAMP) ## is everything formatted?
	@$(BIN)/ruff format --check $(CODE)

format: $(STAMP) ## format, and repair what ruff can repair
	@$(BIN)/ruff check --fix-only --quiet $(CODE)
	@$(BIN)/ruff format $(CODE)

typecheck: $(STAMP) ## mypy on the package
	@$(BIN)/mypy

docs: $(STAMP) ## the documentation site, in site/; every warning is an error
	@$(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP) ## the site on http://127.0.0.1:8000, rebuilt when a file changes
	@$(BIN)/python -m mkdocs serve $(ARGS)

evidence: $(STAMP) ## what is claimed and what is measured, in an hour; ARGS=--night and ARGS=--full take longer
	$(BIN)/python -m benchmarks.evidence $(ARGS)
	$(BIN)/python -m benchmarks.evidence.page

bench: $(STAMP) ## optimizer step time on this machine
	$(BIN)/python -m benchmarks.step_time $(ARGS)

# Not through .venv's stamp: a GPU machine may bring its own torch, and no network to install another one from.
bench-gpu: ## step time and training on this machine's GPU, beside other optimizers, in nine minutes
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_step.py $(ARGS)

report-gpu: ## the tests that need a GPU and bench-gpu in ten minutes, packed into one file to send back
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_report.py $(ARGS)

dist: ## wheel and source distribution, in dist/, checked as a package index checks them
	@rm -rf build dist .venv-dist
	@"$(PYTHON)" -m venv .venv-dist
	@.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@.venv-dist/bin/python -m build
	@.venv-dist/bin/python -m twine check --strict dist/*

# In the order of a user: torch alone first, then what Trainer needs.
test-dist: dist ## install the wheel in an empty environment, and use it there
	@rm -rf .venv-dist && "$(PYTHON)" -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check $(PINS) dist/*.whl
	cd / && $(CURDIR)/.venv-dist/bin/python $(CURDIR)/tests/scripts/torch_alone.py adamw_bf16_split sgd_bf16_sr
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check $(PINS) "$$(echo dist/*.whl)[trainer]"
	cd / && $(CURDIR)/.venv-dist/bin/hf-lowprec doctor

clean: ## remove caches and build products; .venv and results stay
	@rm -rf build dist site *.egg-info .venv-dist .mypy_cache .pytest_cache .ruff_cache
	@find hf_lowprec tests $(wildcard examples benchmarks tools) -name __pycache__ -type d -prune -exec rm -rf {} +
