# make test      the proof that a clone works, set-up and build included, in about 15 minutes: C++, a drawn sample of the
#   Python tests that touches every public name, the code of the pages, the consumer. It builds CUDA only for a GPU.
# make test-all  everything that `make test` leaves out: the rest of each suite, emulators, types, packages, gates.
#   Continuous integration runs both. Of large grids a drawn sample of cases runs.
# make check     the tests for daily work, at most 5 minutes: layout, types, C++ and the sample of the Python tests
# make nightly   everything long: all cases of all grids, sanitizers, all crash points, random kills, fuzzers, 20 seeds, other builds
# make test-newest   build and test against the newest PyTorch
# make test-deepspeed   our optimizers in DeepSpeed's engine, which `make setup` leaves out
# make test-asan   the C++ suite, C++ programs of several processes and all CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer
# make lint    layout, lint and types; make format mends what the tools can mend
# make demo    train and fine-tune a small model, each beside plain PyTorch, and name the report
# make build   the libraries, into python/shoestring; make build-tests builds the C++ programs of the tests as well
# make docs    the documentation, into build-docs/html; make docs-browser tests its pages in Chromium
# make sdist, make wheel, make packages   into dist/: the source distribution; the wheel, for the PyTorch and CUDA of the
#   build; .tar.gz and .deb for C++. make release checks version, changelog, tree and tests, then makes all and the docs
# make bench   the benchmarks, ours beside the peers'
# make gpu-check   on a machine with a GPU: build, suite, emulator, benchmarks, compute-sanitizer. PYTHON=... has PyTorch
VENV ?= .venv
BUILD ?= build
TORCH ?=
GPU_PYTHON := $(if $(filter undefined,$(origin PYTHON)),python3,$(PYTHON))
PYTHON := $(CURDIR)/$(VENV)/bin/python
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export TOKENIZERS_PARALLELISM ?= false
# Without bytecode files, each process that imports PyTorch compiles it again, which takes 2 s of the processor.
unexport PYTHONDONTWRITEBYTECODE
# Tests run the libraries that users get in a wheel. SHOESTRING_PORTABLE needs g++ on x86-64.
PORTABLE := $(if $(filter x86_64,$(shell uname -m)),$(if $(filter default,$(origin CXX)),-DSHOESTRING_PORTABLE=ON))
# The GPUs that kernels are built for (cmake/Cuda.cmake). A build for daily work makes one, `make test-all` one for
# each kind of kernel, and a wheel all. GPUS_SUFFICE is what an existing build folder may have instead.
GPUS := $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | sed "s/\\.//; s/^90$$/90a/"),90a)
GPUS_SUFFICE := .*
wheel packages: GPUS := wheel
wheel packages: GPUS_SUFFICE := wheel
# Without a GPU, `make test`, `make check` and `make demo` build no CUDA kernels, and keep those of an earlier build.
CUDA := auto
CUDA_SUFFICES := auto|1
# What is compiled: the libraries, and the programs of the tests that run.
TARGETS := libraries
# The goals of one command share a build, so `make test test-all` makes that of `test-all`.
ifneq ($(filter test-all nightly,$(MAKECMDGOALS)),)
GPUS := gates
GPUS_SUFFICE := gates|wheel
TARGETS := all
else
test check: TARGETS := first_tier
test check demo: CUDA := $(if $(wildcard /dev/nvidiactl),auto,0)
test check demo: CUDA_SUFFICES := .*
endif
CONFIGURE = cmake -S . -G Ninja -DPython3_EXECUTABLE=$(PYTHON) $(PORTABLE) -DSHOESTRING_CUDA=$(CUDA) \
  -DSHOESTRING_CUDA_ARCHITECTURES=$(GPUS) $(CMAKE_ARGS)
INSTALL := --prefix python/shoestring >/dev/null
SEEDS ?= 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20

.PHONY: setup build build-tests test test-all check nightly chromium test-newest test-deepspeed test-asan lint format docs \
  docs-browser demo bench gpu-check sdist wheel packages release clean

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV) "$(TORCH)"

$(BUILD)/build.ninja: | $(VENV)/.ready
	$(CONFIGURE) -B $(BUILD) -DSHOESTRING_TESTS=ON

build: $(VENV)/.ready $(BUILD)/build.ninja
	grep -qE '^SHOESTRING_CUDA_ARCHITECTURES:STRING=($(GPUS_SUFFICE))$$' $(BUILD)/CMakeCache.txt && \
	  grep -qE '^SHOESTRING_CUDA:STRING=($(CUDA_SUFFICES))$$' $(BUILD)/CMakeCache.txt || \
	  cmake -DSHOESTRING_CUDA=$(CUDA) -DSHOESTRING_CUDA_ARCHITECTURES=$(GPUS) $(BUILD) >/dev/null
	cmake --build $(BUILD) --target $(TARGETS)
	cmake --install $(BUILD) $(INSTALL)

build-tests: TARGETS := all
build-tests: build

test: build
	scripts/test.sh $(BUILD) first

test-all: build
	scripts/test.sh $(BUILD) $(or $(SUITES),second)

check: build
	scripts/test.sh $(BUILD) check

nightly: export PYTEST_ADDOPTS += --all-cases
nightly: SUITES = all
nightly: chromium test-all test-deepspeed test-asan docs-browser
	python -m pytest tests/crash --all --kills 1000
	python -m pytest tests/fuzz --fuzz-seconds 600
	tests/consumer/run.sh $(BUILD) --build
	python tests/simt/cutlass/mutate.py --build $(BUILD)
	python -m pytest tests/packages --all-cases -m nightly
	PYTHONPATH=tests/device:$(PYTHONPATH) python -m pytest tests/device --delay-seeds 20
	python tests/device/remove_waits.py
	python tests/mutations.py --tier second
	SHOESTRING_CUDA=0 $(CONFIGURE) -B build-separate -DSHOESTRING_UNITY=OFF && cmake --build build-separate
	for seed in $(SEEDS); do PYTEST_ADDOPTS="--seed $$seed" scripts/test.sh $(BUILD) Python Python-emulated || exit; done

# The tests of the reports that are marked nightly look at pages in this browser.
chromium:
	command -v chromium >/dev/null || { sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; }

# Without lint: mypy reads the types of the PyTorch that constraints.txt pins.
test-newest:
	$(MAKE) test-all VENV=.venv-newest BUILD=build-newest TORCH=torch \
	  SUITES="C++ emulator cutlass C++-emulated Python Python-alone Python-emulated device crash fuzz peers consumer gates"

# In a folder of its own: where DeepSpeed is installed, Accelerate imports it in every process, which prints lines.
test-deepspeed: build
	python -m pip install -q --upgrade --no-deps --target build-deepspeed -c constraints.txt deepspeed einops hjson msgpack py-cpuinfo \
	  pydantic pydantic-core annotated-types typing-inspection typing-extensions
	PYTHONPATH=build-deepspeed:$(PYTHONPATH) python -m pytest --all-cases -k deepspeed tests/python/distributed/test_frameworks.py

test-asan: $(VENV)/.ready
	SHOESTRING_CUDA=0 $(CONFIGURE) -B build-asan -DSHOESTRING_TESTS=ON -DSHOESTRING_SANITIZE=ON
	cmake --build build-asan --target shoestring shoestring_tests offload_faults distributed_program
	scripts/test_asan.sh build-asan

lint: $(VENV)/.ready
	scripts/lint.sh

format: $(VENV)/.ready
	scripts/lint.sh --fix

docs: build
	python -m sphinx -W -n --keep-going -q -j 2 -d build-docs/doctrees docs build-docs/html

# Installs Chromium, which `make setup` leaves out.
docs-browser: docs
	scripts/docs_browser.sh build-docs/html

demo: build
	$(PYTHON) -m shoestring demo

bench: build
	for script in $(basename $(subst /,.,$(wildcard benchmarks/bench_*.py benchmarks/*/bench_*.py))); do $(PYTHON) -m $$script || exit; done

sdist: $(VENV)/.ready
	env -u PYTHONPATH pyproject-build --sdist --no-isolation --outdir dist >/dev/null

wheel: build
	$(PYTHON) scripts/make_wheel.py $(BUILD) --out dist

packages: build
	rm -rf $(BUILD)/packages && cd $(BUILD) && cpack >/dev/null
	mkdir -p dist && cp $(BUILD)/packages/*.deb $(BUILD)/packages/*.tar.gz dist

release: $(VENV)/.ready
	$(PYTHON) scripts/release.py $(BUILD)

gpu-check:
	$(GPU_PYTHON) scripts/gpu_check.py $(GPU_CHECK_ARGS)

clean:
	rm -rf build build-newest build-asan build-separate build-gpu build-docs build-deepspeed dist
	rm -rf python/shoestring/lib python/shoestring/include python/shoestring/share
