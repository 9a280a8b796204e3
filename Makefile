# make demo   train, be killed, resume, compare: the main job on this machine, in under two minutes
# make test   all tests that a normal machine can run, but for those of make test-slow, which CI runs as well
# make check  what CI runs first: format, lint, types, layers, tests with coverage, packages, start-up times
# make hosts  the tests in real trainers of others, each version in an environment of its own
# make hosts-lightning hosts-transformers-newest PYTEST_ARGS="-m slow"   resumed from every position of an epoch
# make soak   the demo killed at random moments, 20 times, until it ends equal to the uninterrupted run
# make bench-save, bench-interference, bench-startup   what saving and uploading cost beside a training, and what a command takes to start
# make bench-transfer, bench-oss   uploads, downloads and lists beside s5cmd, rclone, obstore, s3fs and oss2
# make pictures   draw docs/pictures anew
# make bench-callbacks   what dispatching an event costs, beside transformers' handler
# make bench-resume   from the start of a resume to the end of the first step, beside s5cmd and torch.load
#
# Each makes the environment .venv first, when it is missing or older than pyproject.toml or constraints.txt. Variables:
#   PYTHON       the Python to make .venv with                make test PYTHON=python3.12
#   PIP_ARGS     more for `pip install`; a package index with CPU builds of torch saves some GB on Linux:
#                                                             make demo PIP_ARGS='--extra-index-url URL'
#   STORE        where the demo keeps its checkpoints         make demo STORE=s3://bucket/prefix
#   JOBS         processes that the tests run in (2)           make test JOBS=1
#   PYTEST_ARGS  more for pytest                              make test PYTEST_ARGS='tests/core -x'
#   BENCH_ARGS   more for a bench, its --help tells            make bench-save BENCH_ARGS='--record docs/benchmarks.md'
#   KILLS        of the soak (20)                              make soak KILLS=200
#   VENV         the environment's directory (.venv)

PYTHON ?= python3
PIP_ARGS ?=
STORE ?=
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
KILLS ?= 20
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each process starts test stores of its own; the tests of a class or module stay in one. Modules of few tests, which are the longest ones,
# would come last otherwise, and one process would wait for the other.
PYTEST := -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadscope --no-loadscope-reorder) \
  --durations=25 --durations-min=3 $(PYTEST_ARGS)
FORMATTED := ckptmgr callbacks backends tests bench .ci

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests of a checkout must not read modules from the caller's own path. Without bytecode each of the hundreds of processes that they start would
# compile ckptmgr anew, and pytest rewrite every test.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow check format-check lint types layers coverage package hosts soak \
  bench-startup bench-save bench-interference bench-transfer bench-oss bench-resume bench-callbacks pictures constraints clean FORCE

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# --- the environment ---------------------------------------------------------------------------------------------------

venv: $(STAMP)

# An environment names its own directory in every script: one that was moved with its checkout is made again.
ifneq ($(CURDIR),$(shell cat $(STAMP) 2>/dev/null))
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here; install Python 3.10 or newer, or name one: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), ckptmgr needs 3.10 or newer; name one: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make environments (no venv or ensurepip); on Debian: apt-get install python3-venv" >&2; exit 2; }
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(CURDIR)" ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "Making the environment $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV); fi
	@echo "Installing ckptmgr and what it needs into $(VENV); the first time this takes some minutes"
	@$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@printf '%s\n' '$(CURDIR)' > $@

# --- what it is for ----------------------------------------------------------------------------------------------------

demo: $(STAMP)
	$(BIN)/ckptmgr demo $(if $(STORE),--store '$(STORE)')

test: $(STAMP)
	$(BIN)/python $(PYTEST) -m 'not slow'

test-slow: $(STAMP)
	$(BIN)/python $(PYTEST) -m slow

# --- what CI runs ------------------------------------------------------------------------------------------------------

check: format-check lint types layers coverage package bench-startup

format-check: $(STAMP)
	$(BIN)/ruff format --check $(FORMATTED)

lint: $(STAMP)
	$(BIN)/ruff check $(FORMATTED)
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

package: $(STAMP)
	.ci/packages $(BIN)/python

# Each file names the releases of one environment.
HOSTS := $(patsubst tests/hosts/%.txt,%,$(wildcard tests/hosts/*.txt))

hosts: $(HOSTS:%=hosts-%)

hosts-%: build/hosts/%/.installed
	build/hosts/$*/bin/python -m pytest -q -n 2 --dist load -m 'not slow' tests/hosts $(PYTEST_ARGS)

.PRECIOUS: build/hosts/%/.installed
build/hosts/%/.installed: tests/hosts/%.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	@echo "Installing the trainers of tests/hosts/$*.txt; this takes a minute"
	@$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)" -r $< -e '.[torch,s3,testing]'
	@touch $@

soak: $(STAMP)
	$(BIN)/python bench/soak.py --kills $(KILLS)

bench-startup: $(STAMP)
	$(BIN)/python bench/startup.py --assert $(BENCH_ARGS)

bench-save bench-interference bench-transfer bench-oss bench-resume: bench-%: $(STAMP)
	$(BIN)/python bench/$*.py $(BENCH_ARGS)

# Beside transformers' own handler.
bench-callbacks: build/hosts/transformers-newest/.installed
	build/hosts/transformers-newest/bin/python bench/callbacks.py $(BENCH_ARGS)

# What docs/callbacks.md shows, drawn from the demo's training.
pictures: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) matplotlib
	$(BIN)/python -m ckptmgr.demo.pictures docs/pictures

# --- upkeep ------------------------------------------------------------------------------------------------------------

# The newest releases of everything but torch, in an environment of its own; then run the tests with them.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)" -e '.[dev]'
	build/constraints/bin/python .ci/constraints.py > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build dist ckptmgr.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
