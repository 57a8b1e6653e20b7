# Tokenway: everything that one does in a checkout. `make` lists the targets.
#
#   TOKENWAY_CUDA=AUTO|ON|OFF   for build        ARGS="..."   for bench
#   TOKENWAY_SM="80;90;100"     for build: the GPUs to compile kernels for (default: those that are here; without one, 90)
#   TESTS=1                     for build: the C++ tests too
#   ALL=1                       for test-py, test-core: all of them, as for test-all
#   CCACHE=                     for builds: no ccache (default: it serves where it is installed)
#   TORCH=0, TW_STRICT=1 and others: scripts/setup.sh

SHELL := /bin/bash
PY    := $(CURDIR)/.venv/bin/python
CMAKE := $(CURDIR)/.venv/bin/cmake
NINJA := $(CURDIR)/.venv/bin/ninja
SETUP := scripts/setup.sh
STAGE := scripts/stage.sh
TOKENWAY_CUDA ?= AUTO
MAKEFLAGS += --no-print-directory

export TSAN_OPTIONS  := halt_on_error=1:second_deadlock_stack=1
export UBSAN_OPTIONS := print_stacktrace=1
export ASAN_OPTIONS  := detect_stack_use_after_return=1
# What the caller's shell carries must not change what is built or tested, nor make each process compile PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTEST_ADDOPTS CFLAGS CXXFLAGS CPPFLAGS LDFLAGS DESTDIR
unexport LD_PRELOAD $(filter-out TOKENWAY_CUDA TOKENWAY_SM,$(filter CMAKE_% TOKENWAY_% SKBUILD_%,$(.VARIABLES)))

# Development runs the package from the tree, the library from build/; test_wheel.sh installs.
TREE := PYTHONPATH=$(CURDIR)/python TOKENWAY_LIBRARY=$(CURDIR)/build/libtokenway.so
UNITY     = -DCMAKE_UNITY_BUILD=ON  # 8 sources at once: half of the time goes into the same headers again and again
CCACHE   ?= $(shell command -v ccache)
LAUNCHERS = --no-warn-unused-cli $(foreach l,CXX CUDA,-DCMAKE_$l_COMPILER_LAUNCHER=$(CCACHE))
# The same source in another checkout is the same object.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
CONFIGURE = $(CMAKE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -S . $(LAUNCHERS)
CXX_FILES = $(shell find src include tests examples -regex '.*\.\(c\|cc\|h\|cu\|cuh\)')

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## the library, into build/
	@$(SETUP) run $(if $(TESTS),test)
	@$(CONFIGURE) -B build $(if $(TESTS),-DTOKENWAY_TESTS=ON) -DTOKENWAY_CUDA=$(TOKENWAY_CUDA) $(UNITY)
	@$(CMAKE) --build build --target all $(if $(TESTS),tokenway_tests)

run: build  ## a small MoE job, end to end
	@$(TREE) $(PY) examples/main_job.py examples/text/experts.txt

bench: build  ## measure dispatch and combine (ARGS="--help" says what can be asked)
	@$(TREE) $(PY) -m tokenway.cli bench $(ARGS)

# What one runs between two edits: each kind of test, none that takes long.
check:  ## within two minutes: lint, C++ plain, the quickest of Python's tests
	@$(SETUP) run lint test
	@$(MAKE) lint
	@$(STAGE) "build" $(MAKE) build TESTS=1
	@scripts/beside.sh "$(MAKE) check-py" "$(MAKE) check-cc"

CHECK_PY = abi errors exchange handles leases loads properties routing sentences torch usage
check-py:
	@EXAMPLES=5 $(TREE) $(STAGE) "Python, the quickest tests" $(PY) -m pytest -q $(CHECK_PY:%=tests/py/test_%.py) \
	  -m "not long and not slow and not processes" -k "not processes"

check-cc:
	@$(STAGE) "C++ tests" build/$(RUN_TESTS) --gtest_filter='-Threads.*:Shrink.*'

# In front what waits much, behind it what computes, so that the cores are never idle. The library is built before, once
# for both (BUILT).
test:  ## what must pass before a commit: C++, models, Python, kernels on emulated GPUs (a quarter of an hour)
	@$(SETUP) run test
	@$(STAGE) "build" $(MAKE) build TESTS=1
	@scripts/beside.sh "$(MAKE) test-py BUILT=1" "$(MAKE) test-core test-portable test-fabric BUILT=1"

# Whatever `make test` leaves out, or does with fewer examples: see CONTRIBUTING.md.
test-all:  ## everything: also sanitizers, mutations, the wheel, and what takes long of the others (an hour)
	@$(SETUP) run test
	@$(STAGE) "build" $(MAKE) build TESTS=1
	@scripts/beside.sh "$(MAKE) test-py test-frameworks test-portable test-fabric test-wheel ALL=1 BUILT=1" \
	  "$(MAKE) test-core test-sanitizers test-mutations ALL=1 BUILT=1"

# Fewer examples of the tests that draw them, and nothing that is marked `long`.
SOME_PY = $(if $(ALL),,-m "not long")
SOME    = $(if $(ALL),,EXAMPLES=25 ROUNDS=300)
test-py:  ## Python on the CPU
	@$(SETUP) run test
	@$(if $(BUILT),,$(STAGE) "build" $(MAKE) build)
	@$(SOME) $(TREE) $(STAGE) "Python tests" $(PY) -m pytest tests/py $(APART:%=--ignore=%) $(SOME_PY)

# Integrations whose packages no other test has: in .venv/frameworks and .venv/sglang.
APART = $(addprefix tests/py/test_,torchtitan.py vllm.py vllm_graphs.py vllm_eplb.py bench_vllm.py \
  sglang.py sglang_eplb.py)
test-frameworks:  ## integrations with packages of their own: torchtitan, vLLM, SGLang
	@$(SETUP) run test apart
	@$(if $(BUILT),,$(STAGE) "build" $(MAKE) build)
	@$(TREE) $(STAGE) "frameworks" $(PY) -m pytest $(APART)

test-portable:  ## the tests of behaviour over the portable backend
	@$(SETUP) run test
	@$(if $(BUILT),,$(STAGE) "build" $(MAKE) build)
	@SHAPES=60 $(SOME) $(TREE) $(STAGE) "portable backend" $(PY) -m pytest tests/py/test_survival.py tests/py/test_exchange.py \
	  tests/py/test_collectives.py tests/py/test_row_types.py tests/py/test_growth.py tests/py/test_parts.py \
	  tests/py/test_arena.py tests/py/test_auto.py tests/py/test_choice_values.py \
	  tests/py/test_choice_values_refused.py tests/py/test_per_expert.py tests/py/test_per_expert_refused.py \
	  tests/py/test_any_placement.py tests/py/test_grouped_by_bound.py tests/py/test_bias.py tests/py/test_domain.py \
	  tests/py/test_balancer.py --backend torch -k "not threads" -m "$(if $(ALL),,not long and )not heavy"

# Ranks of this host are split into hosts of two; then between namespaces, which not every machine lets one make: there
# it says that it skips them, and is no failure (make test-netns is).
FABRIC_PY = exchange errors survival throughput collectives leases growth parts auto per_expert bias domain moving balancer \
  moved_ranks
test-fabric:  ## the tests of behaviour between hosts, a part of them
	@$(SETUP) run test
	@$(if $(BUILT),,$(STAGE) "build" $(MAKE) build)
	@EXAMPLES=10 $(TREE) $(STAGE) "between hosts" $(PY) -m pytest $(FABRIC_PY:%=tests/py/test_%.py) --backend fabric \
	  -k "not threads and not stacked" -m "not slow and not long and not heavy"
	@$(if $(ALL),env -u TW_STRICT EXAMPLES=10 $(TREE) $(STAGE) "between namespaces" $(PY) tests/netns/run_all.py --quick)

wheel:  ## dist/*.whl, with kernels for all GPUs (TOKENWAY_SM="90": for some)
	@$(SETUP) run test
	@TOKENWAY_SM="$(or $(TOKENWAY_SM),all)" $(PY) -m pip wheel . --no-deps --wheel-dir dist
	@ls -l dist/*.whl

test-wheel:  ## the wheel, as a user gets it
	@$(SETUP) run test
	@$(STAGE) "wheel" env $(if $(ALL),'TOKENWAY_SM=80;100',-u TOKENWAY_SM) tests/wheel/test_wheel.sh  # the build has 90

# setarch -R: ThreadSanitizer of GCC 12 cannot map its shadow under much address randomisation.
RUN_TESTS = tokenway_tests --gtest_brief=1
FIXED     = $(shell setarch -R true 2>/dev/null && echo setarch -R)
test-cc:  ## the C++ tests
	@$(SETUP) run test
	@$(if $(BUILT),,$(STAGE) "build" $(MAKE) build TESTS=1)
	@$(STAGE) "C++ tests" build/$(RUN_TESTS)
	@$(foreach each,1 $(if $(ALL),2),TOKENWAY_TEST_HOSTS=$(each) $(STAGE) "C++ tests, hosts of $(each)" build/$(RUN_TESTS) &&) true

test-sanitizers:  ## the C++ tests in two builds more: thread, and address and undefined
	@$(SETUP) run test
	@$(STAGE) "C++ tests, thread sanitizer: build" $(MAKE) build/tsan
	@$(STAGE) "C++ tests, thread sanitizer" $(FIXED) build/tsan/$(RUN_TESTS)
	@$(STAGE) "C++ tests, address and undefined sanitizers: build" $(MAKE) build/asan
	@$(STAGE) "C++ tests, address and undefined sanitizers" build/asan/$(RUN_TESTS)

build/tsan: TREE_FLAGS = -DCMAKE_BUILD_TYPE=Debug -DTOKENWAY_SANITIZE=thread
build/asan: TREE_FLAGS = -DCMAKE_BUILD_TYPE=Debug -DTOKENWAY_SANITIZE=address,undefined
build/tsan build/asan:
	@$(CONFIGURE) -B $@ --log-level=NOTICE -DTOKENWAY_TESTS=ON -DTOKENWAY_CUDA=OFF $(UNITY) $(TREE_FLAGS)
	@$(CMAKE) --build $@ --target tokenway_tests

test-core:  ## C++, the protocol's models, and the CUDA kernels on emulated GPUs
	@$(MAKE) test-cc
	@$(MAKE) spec $(if $(ALL),,SPEC=--quick)
	@CCACHE=$(CCACHE) $(STAGE) "CUDA kernels on emulated GPUs" $(PY) tests/emulator/run.py $(if $(ALL),--threads,--quick)
	@CCACHE=$(CCACHE) $(STAGE) "CUDA kernels between hosts" $(PY) tests/emulator/run.py --quick --gin
	@$(if $(ALL),CCACHE=$(CCACHE) $(STAGE) "CUDA kernels between devices apart" $(PY) tests/emulator/run.py --quick --staged)
	@$(if $(ALL),CCACHE=$(CCACHE) $(STAGE) "CUDA kernels over a transport that counts" $(PY) tests/emulator/run.py --counted)

test-mutations:  ## break the library on purpose; a test must notice each
	@$(SETUP) run test
	@CCACHE=$(CCACHE) $(STAGE) "mutations" $(PY) tests/mutations/run.py $(if $(ALL),--share 5)

test-emulated:  ## the CUDA kernels on emulated GPUs, whole (ARGS="-k rounds -x" and others)
	@$(SETUP) run test
	@CCACHE=$(CCACHE) $(PY) tests/emulator/run.py $(ARGS)

test-netns: build  ## between network namespaces that stand for hosts (root, or user namespaces; ARGS="-k cut")
	@$(SETUP) run test
	@$(TREE) $(PY) tests/netns/run_all.py $(ARGS)

soak: build  ## long and random, on one host and between two: 10,000 rounds, 50 ranks killed, 20 stopped (an hour)
	@$(SETUP) run test
	@$(TREE) $(PY) tests/py/soak.py --rounds 10000 --kills 50 --stops 20 --moves 2000
	@$(TREE) $(PY) tests/netns/run_all.py --soak --rounds 10000 --kills 50 --stops 20

spec:  ## check the protocol's models
	@$(SETUP) run spec
	@$(STAGE) "models (spin)" $(PY) spec/run.py $(SPEC)

lint:  ## style, formatting and the rules of the tree
	@$(SETUP) lint
	@$(STAGE) "ruff check" $(PY) -m ruff check .
	@$(STAGE) "ruff format" $(PY) -m ruff format --check .
	@$(STAGE) "clang-format" .venv/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@$(STAGE) "rules of the tree" $(PY) scripts/check_tree.py
	@$(STAGE) "texts of mutations" $(PY) tests/mutations/run.py --texts

format:  ## put the formatting right
	@$(SETUP) lint
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@.venv/bin/clang-format -i $(CXX_FILES)

# An existing Python with PyTorch and pytest (GPU_PYTHON) and an existing library (TOKENWAY_LIBRARY) serve where
# nothing can be installed or built.
GPU_PYTHON ?= $(PY)
GPU_LIBRARY = $(abspath $(or $(TOKENWAY_LIBRARY),build/gpu/libtokenway.so))
ON_GPU      = PYTHONPATH=$(CURDIR)/python TOKENWAY_LIBRARY=$(GPU_LIBRARY) $(GPU_PYTHON)
OWN_PYTHON  = $(filter $(PY),$(GPU_PYTHON))
BUILD_GPU   = TOKENWAY_LIBRARY=$(TOKENWAY_LIBRARY) $(if $(OWN_PYTHON),python3,$(GPU_PYTHON)) tests/gpu/build_library.py

test-gpu: gpu-library  ## all that needs GPUs (ARGS="--part suite -x" and others; CONTRIBUTING.md)
	@$(ON_GPU) tests/gpu/run_all.py $(ARGS)

bench-gpu: gpu-library  ## measure dispatch and combine between GPUs, a process for each (ARGS="--help")
	@CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER \
	  $(ON_GPU) -m tokenway.cli bench --backend nvlink $(ARGS)

gpu-library:
	@$(BUILD_GPU) --check
	@$(if $(OWN_PYTHON),$(SETUP) run test)
	@$(BUILD_GPU)

clean:  ## remove what was built; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.PHONY: help build run bench check check-py check-cc test test-all test-py test-frameworks test-portable test-fabric test-core test-cc \
	test-sanitizers wheel test-wheel test-mutations test-emulated test-netns \
	build/tsan build/asan soak spec lint format test-gpu bench-gpu gpu-library clean
