# What measures: a server, the small model (or MODEL) offline, parts of the engine, and a GPU.

.PHONY: bench-latency bench-throughput bench-speculation bench-structured-output bench-scheduler bench-serving bench-gpu \
	bench-step bench-families bench-kernels bench-all-reduce bench-experts bench-document tune-experts tune-quantized

##@ Measure
bench-serving: install ## requests to a server on HOST:PORT, as `make serve` starts one; more flags in ARGS
	@$(BIN)/python -m atom.benchmarks.benchmark_serving $(SERVED) --host $(HOST) --port $(PORT) --dataset-name random \
		--random-input-len 128 --random-output-len 64 --num-prompts 32 --max-concurrency 4 --ignore-eos $(ARGS)

bench-latency: install ## milliseconds of a batch, a first and a later token of the small model, offline
	@$(BIN)/python -m benchmarks.latency --model $(CHOSEN) --input-len 128 --output-len 64 \
		--num-iters-warmup 1 --num-iters 5 $(ARGS)

bench-throughput: install ## requests and tokens a second of the small model, offline
	@$(BIN)/python -m benchmarks.throughput --model $(CHOSEN) --input-len 128 --output-len 64 \
		--num-prompts 64 $(ARGS)

bench-speculation: install ## n-gram speculation on a copying task: tokens per step and speed-up of the small model
	@$(BIN)/python -m benchmarks.speculation --model $(CHOSEN) --method ngram --num-speculative-tokens 4 \
		--prompt-lookup-min 2 --input-len 64 --output-len 96 $(ARGS)

bench-structured-output: install ## cost of structured output at 32 requests, and of loading a large grammar
	@$(BIN)/python -m benchmarks.structured_output --model $(CHOSEN) $(ARGS)

bench-scheduler: $(INSTALLED) ## microseconds that the scheduler takes for a step
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)

##@ Measure on a GPU
bench-gpu: $(INSTALLED) ## the engine on a GPU, and vLLM's recorded figures; writes the page of all results
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-step: $(INSTALLED) ## what a decode step takes on a GPU, and its kernels; --model PATH in ARGS
	@$(BIN)/python -m benchmarks.decode_step $(ARGS)

bench-families: $(INSTALLED) ## decode steps of each family's first layers at real width, against their floors
	@$(BIN)/python -m benchmarks.families $(ARGS)

bench-kernels: $(INSTALLED) ## every op with every provider, and what the device can do
	@$(BIN)/python -m benchmarks.kernels $(ARGS)

bench-all-reduce: $(INSTALLED) ## microseconds of an all-reduce and a norm between the GPUs of this host
	@$(BIN)/python -m benchmarks.all_reduce $(ARGS)

bench-experts: $(INSTALLED) ## microseconds of a dispatch to experts and its combine between the GPUs of this host
	@$(BIN)/python -m benchmarks.expert_dispatch $(ARGS)

bench-document: $(INSTALLED) ## write the page and the picture of all kept results; add a result: FILE in ARGS
	@$(BIN)/python -m benchmarks.record $(ARGS)
	@$(BIN)/python -m benchmarks.picture

tune-experts: $(INSTALLED) ## tiles of the expert kernels, measured on a Hopper GPU; --models and --tokens in ARGS
	@$(BIN)/python -m tools.tune_experts $(ARGS)

tune-quantized: $(INSTALLED) ## plans of linear layers with quantized weights, measured on a GPU; --models, --formats, --tokens in ARGS
	@$(BIN)/python -m tools.tune_quantized $(ARGS)
