# make train and make test need python3 (with venv), g++ and make; all else goes into .venv.
# make test-cuda-sim needs nvcc too; all else goes into .venv-cuda. `make help` lists the targets.

# What pip installs as torch, with options if need be:
#   make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" test
TORCH ?= torch==2.13.0
# The same for make test-cuda-sim: a CUDA build, of the CUDA version that nvcc is of.
TORCH_CUDA ?= torch==2.14.1
PYTHON ?= python3
RANKS ?= 2
# Options of examples/train_gpt.py: make train ARGS="--stage 1 --precision bf16"
ARGS ?=

BIN := .venv/bin
CUDA_BIN := .venv-cuda/bin
# ninja must be found by setup.py, and cmake where the system has none.
export PATH := $(CURDIR)/$(BIN):$(CURDIR)/$(CUDA_BIN):$(PATH)
# A rank is a process; more threads than cores would fight for them.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Linters are pinned: their next version finds other things. The rest takes what fits torch.
BUILD_TOOLS := numpy pybind11 ninja "setuptools>=77" wheel
# They show what nvcc made of the kernels.
CUDA_TOOLS := nvidia-cuda-cuobjdump==13.2.51 nvidia-cuda-nvdisasm==13.2.51
# safetensors and torchdata read and resume what zerocore writes and saves; transformers has models
# that zerocore did not make; matplotlib draws traces.
TEST_TOOLS := pytest safetensors torchdata transformers matplotlib ruff==0.17.6 clang-format==23.1.5
CMAKE_TOOL := $(if $(shell command -v cmake),,cmake)
REQUIREMENTS := $(TORCH) $(BUILD_TOOLS) $(TEST_TOOLS) $(CMAKE_TOOL) $(if $(shell command -v nvcc),$(CUDA_TOOLS))
# cuobjdump tells what an extension holds for GPUs.
CUDA_REQUIREMENTS := $(TORCH_CUDA) $(BUILD_TOOLS) pytest $(CUDA_TOOLS)

CPP := $(sort $(shell find csrc tests -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'))
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node $(RANKS)

.PHONY: help train test build lint test-cpp test-python test-train test-cuda-sim bench format \
	clean distclean FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: build ## train a GPT on RANKS (2) ranks for some minutes; ARGS="--stage 1 ..." changes the run
	$(TORCHRUN) examples/train_gpt.py $(ARGS)

test: lint test-cpp test-python test-train ## all tests on the CPU; CI runs test-cuda-sim too

bench: build ## speed and memory beside DDP, FSDP2 and, where it is installed, DeepSpeed; ARGS=--quick
	$(BIN)/python benchmarks/bench.py $(ARGS)

build: .venv/built ## set up .venv and compile the extension in place

lint: .venv/installed ## formatting and static checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: .venv/installed ## put the sources into the form that lint wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

test-cpp: test-cpp-asan test-cpp-tsan ## the C++ tests, with sanitizers for memory, arithmetic, threads

SANITIZE_asan := address,undefined
SANITIZE_tsan := thread
test-cpp-%: .venv/installed
	cmake -S cmake -B build/$* -G Ninja -DZEROCORE_SANITIZE=$(SANITIZE_$*)
	cmake --build build/$*
	ctest --test-dir build/$* --output-on-failure

test-python: build ## the Python tests
	$(BIN)/pytest

test-train: build ## short runs of the example: it must learn, hold and send what it should
	$(TORCHRUN) examples/train_gpt.py $(SHORT) --stage 3
	$(TORCHRUN) examples/train_gpt.py $(SHORT) --stage 1 --precision bf16 --grad-accum 2

test-cuda-sim: .venv-cuda/built ## zerocore built with CUDA, tested on simulated GPUs
	$(CUDA_BIN)/pytest tests/cuda_sim tests/test_env.py tests/test_build.py

# An untrained model has 8 bits per byte; one that only knows how often each byte occurs, 4.8.
SHORT := --layers 2 --dim 64 --heads 2 --seq 64 --batch 16 --steps 160 --warmup 10 --lr 1e-2 \
	--eval-every 80 --eval-bytes 16384 --sample 100 --check 4.1

clean: ## remove what was built
	rm -rf build dist *.egg-info zerocore/*.so .pytest_cache .ruff_cache .venv/built
	rm -f .venv-cuda/built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -r {} +

distclean: clean ## remove .venv and .venv-cuda too
	rm -rf .venv .venv-cuda

# Stamps: each is newer than what it was made from, so that a second run has nothing to do.

VENVS := .venv .venv-cuda
.venv/requirements .venv/installed: WANTED = $(REQUIREMENTS)
.venv-cuda/requirements .venv-cuda/installed: WANTED = $(CUDA_REQUIREMENTS)

# Holds the wanted packages, and is rewritten only when they are others than last time.
$(VENVS:=/requirements): %/requirements: FORCE
	@test -x $*/bin/python || $(PYTHON) -m venv $*
	@printf '%s\n' '$(WANTED)' | cmp -s - $@ || printf '%s\n' '$(WANTED)' > $@

$(VENVS:=/installed): %/installed: %/requirements
	$*/bin/pip install $(WANTED)
	@touch $@

.venv/built: .venv/installed setup.py pyproject.toml $(filter csrc/%,$(CPP))
	@echo "Compiling zerocore (some minutes the first time)"
	$(BIN)/pip install --no-build-isolation --no-deps --editable .
	@touch $@

# Not in place: the extension of .venv has the same name.
.venv-cuda/built: .venv-cuda/installed setup.py pyproject.toml $(filter csrc/%,$(CPP)) \
		$(wildcard zerocore/*.py)
	@echo "Compiling zerocore with CUDA (some minutes the first time)"
	rm -rf build/lib.* # or modules that are gone would be installed
	ZEROCORE_CUDA=1 $(CUDA_BIN)/pip install --no-build-isolation --no-deps --force-reinstall .
	@touch $@
