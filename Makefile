# make test    everything that continuous integration runs, set-up included
# make check   the tests for daily work: layout, types, and the tests that need no other process and no training
# make nightly   everything long: sanitizers, all crash points, random kills, fuzzers, 20 seeds, a build without CUDA
# make test-asan   the C++ suite and all CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer
# make lint    layout, lint and types; make format mends what the tools can mend
# make demo    train and fine-tune a small model, each beside plain PyTorch, and name the report
# make build   the libraries, into python/shoestring
# make bench   the benchmarks, ours beside the peers'
# make gpu-check   on a machine with a GPU: build, suite, emulator, benchmarks, compute-sanitizer. PYTHON=... has PyTorch
# make test-newest   build and test against the newest PyTorch
VENV ?= .venv
BUILD ?= build
TORCH ?=
GPU_PYTHON := $(if $(filter undefined,$(origin PYTHON)),python3,$(PYTHON))
PYTHON := $(CURDIR)/$(VENV)/bin/python
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup build test check nightly test-asan lint format test-newest demo bench gpu-check clean

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV) "$(TORCH)"

$(BUILD)/build.ninja: | $(VENV)/.ready
	cmake -S . -B $(BUILD) -G Ninja -DPython3_EXECUTABLE=$(PYTHON) -DSHOESTRING_TESTS=ON \
	  $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache) $(CMAKE_ARGS)

build: $(VENV)/.ready $(BUILD)/build.ninja
	cmake --build $(BUILD)
	cmake --install $(BUILD) --prefix python/shoestring >/dev/null

test: build
	scripts/test.sh $(BUILD)

lint: $(VENV)/.ready
	scripts/lint.sh

format: $(VENV)/.ready
	scripts/lint.sh --fix

test-newest:
	$(MAKE) test VENV=.venv-newest BUILD=build-newest TORCH=torch

demo: build
	$(PYTHON) -m shoestring demo

bench: build
	for script in $(basename $(subst /,.,$(wildcard benchmarks/*/bench_*.py))); do $(PYTHON) -m $$script || exit; done

gpu-check:
	$(GPU_PYTHON) scripts/gpu_check.py $(GPU_CHECK_ARGS)

clean:
	rm -rf build build-newest build-gpu python/shoestring/lib python/shoestring/include python/shoestring/share
