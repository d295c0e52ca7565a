"""Flags of vLLM and of llama.cpp's server, and what this server has in their place.

The command line accepts those that have nothing to change here, with a line in the log, and refuses the
others with the flag to use. docs/use/coming-from.md is made from these tables.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["LLAMA_CPP", "SAME", "VLLM", "OtherFlag", "Takes", "other_flags", "setting_advice"]


class Takes(Enum):
    """What follows a flag on the command line, if it is accepted."""

    NOTHING = 0
    A_VALUE = 1


@dataclass(frozen=True)
class OtherFlag:
    """One flag with its spellings, separated by spaces."""

    spellings: str
    advice: str
    """What to use, or why nothing is needed."""
    accepted: Takes | None = None
    """None: the flag is refused with the advice."""
    values: tuple[str, ...] = ()
    """The values that are accepted; empty: all."""

    @property
    def names(self) -> list[str]:
        """The spellings, the longest last."""
        return self.spellings.split()


def _switch(spellings: str, advice: str) -> OtherFlag:
    return OtherFlag(spellings, advice, Takes.NOTHING)


def _value(spellings: str, advice: str, *values: str) -> OtherFlag:
    return OtherFlag(spellings, advice, Takes.A_VALUE, values)


_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_ONE_NODE_EACH = "use --data-parallel-size, and for several nodes --nnodes, --node-rank and --master-addr"
_GRAPHS = "use --cudagraph-capture-sizes"
_IMAGES = "images are read as the checkpoint says, and come with requests: leave it out"
_MMPROJ = "a vision tower is read from a checkpoint's directory: use --model, and see docs/use/images.md"
_REQUEST = "each request sets its own; --override-generation-config has the defaults"
_DEVICE = "a model is on one kind of device as a whole: use --device"
_DTYPE = "use --kv-cache-dtype, which holds for keys and values"
_ROPE = 'use --hf-overrides, as \'{"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}\''
_MODEL = "use --model with a directory, a .gguf file, owner/name, owner/name:file.gguf or owner/name:Q4_K_M"
_LOG = "use --log-level"
_BATCHING = "batching is always continuous"
_PORT = "the HTTP port on one node, unless --server-port is given, which is its own name"
_DRAFTS = "use --draft-model with --method draft_model"

SAME = (
    *("--model", "--served-model-name", "--revision", "--download-dir", "--dtype", "--max-model-len"),
    *("--hf-overrides", "--override-generation-config", "--trust-remote-code", "--config"),
    *("--host", "--api-key", "--api-server-count", "--chat-template", "--tool-call-parser"),
    *("--reasoning-parser", "--allow-credentials", "--allowed-origins", "--allowed-methods"),
    *("--allowed-headers", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
    *("--tensor-parallel-size", "--data-parallel-size", "--decode-context-parallel-size"),
    *("--enable-expert-parallel", "--all2all-backend", "--enable-eplb", "--eplb-config"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-token-threshold", "--scheduling-policy"),
    *("--block-size", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-dtype"),
    *("--enable-prefix-caching", "--kv-events-config", "--enforce-eager", "--cudagraph-capture-sizes"),
    *("--otlp-traces-endpoint", "--shutdown-timeout", "--limit-mm-per-prompt", "--allowed-media-domains"),
)
"""Flags of vLLM that mean the same here."""

VLLM = (
    _value("--port", _PORT),
    OtherFlag("-q --quantization", "the checkpoint says it; --online-quant-config quantizes a plain one"),
    _value("--load-format", "--load-dummy takes random weights", "auto", "safetensors"),
    OtherFlag("--tokenizer --tokenizer-revision", "put the other into the checkpoint's directory"),
    _value("--tokenizer-mode", "the tokenizer's file says it", "auto", "hf"),
    OtherFlag("--skip-tokenizer-init", "a checkpoint without a tokenizer serves token ids"),
    OtherFlag("--hf-token", "set the variable HF_TOKEN"),
    OtherFlag("--hf-config-path", "put the config into the checkpoint's directory, or use --hf-overrides"),
    OtherFlag("--code-revision", "code from a checkpoint is never run: leave it out"),
    _value("--config-format", "the checkpoint's files say it", "auto", "hf"),
    _value("--generation-config", "use --override-generation-config", "auto"),
    _value("--task --runner", "models generate texts", "auto", "generate"),
    OtherFlag("--convert", "models generate texts, and no embeddings"),
    _value("--model-impl", "models are ATOM's own", "auto"),
    OtherFlag("--seed", "requests set `seed`: the same seed gives the same output"),
    _value("--max-logprobs", "a request may ask for 20", "20"),
    OtherFlag("--rope-scaling --rope-theta", _ROPE),
    _switch("--enable-auto-tool-choice", "a request that has tools may always call them"),
    OtherFlag("--tool-parser-plugin --reasoning-parser-plugin", "use --tool-call-parser, --reasoning-parser"),
    OtherFlag("--exclude-tools-when-tool-choice-none", "leave `tools` out of such requests"),
    _value("--chat-template-content-format", "the template tells", "auto"),
    OtherFlag("--default-chat-template-kwargs", "requests set `chat_template_kwargs`"),
    _value("--response-role", "replies have the role assistant", "assistant"),
    OtherFlag("--return-tokens-as-token-ids", "requests set `return_tokens_as_token_ids`"),
    _switch("--enable-prompt-tokens-details", "responses always have them"),
    OtherFlag("--enable-force-include-usage", "streaming requests set `stream_options.include_usage`"),
    OtherFlag("--enable-server-load-tracking", "/metrics has the load"),
    _switch("--enable-request-id-headers", "responses always have X-Request-Id"),
    OtherFlag("--uvicorn-log-level --log-config-file", _LOG),
    _switch("--disable-uvicorn-access-log", "there is no access log; /metrics counts requests"),
    _value("--disable-access-log-for-endpoints", "there is no access log; /metrics counts requests"),
    _switch("--disable-log-requests --no-enable-log-requests", "--log-level debug alone logs them"),
    OtherFlag("--enable-log-requests", "use --log-level debug, which logs a line for each request"),
    _switch("--disable-log-stats", "statistics are not logged; /metrics and the status page have them"),
    _value("--max-log-len", "texts of requests are never logged"),
    OtherFlag("--disable-fastapi-docs", "there is /openapi.json alone, which needs the --api-key"),
    OtherFlag("--disable-frontend-multiprocessing", "--api-server-count is the number of HTTP processes"),
    OtherFlag("--uds", "use --host and --server-port"),
    OtherFlag("--root-path", "let the proxy remove the prefix of the path"),
    OtherFlag("--middleware", "put a proxy in front: see docs/operate/operations.md"),
    OtherFlag("--lora-modules --enable-lora --max-loras --max-lora-rank", _LORA),
    OtherFlag("--headless", "a node with --node-rank above 0 serves HTTP only with --frontend-per-node"),
    _value("--distributed-executor-backend", "processes are ATOM's own, on several nodes too", "mp", "uni"),
    _value("-pp --pipeline-parallel-size", "use --tensor-parallel-size", "1"),
    OtherFlag("-dpl --data-parallel-size-local", _ONE_NODE_EACH),
    OtherFlag("-dpa --data-parallel-address", _ONE_NODE_EACH),
    OtherFlag("-dpp --data-parallel-rpc-port", _ONE_NODE_EACH),
    OtherFlag("-dpr --data-parallel-start-rank --data-parallel-rank", _ONE_NODE_EACH),
    OtherFlag("-dpb --data-parallel-backend", _ONE_NODE_EACH),
    OtherFlag("--data-parallel-hybrid-lb --data-parallel-external-lb", "use --dp-load-balance"),
    OtherFlag("--num-redundant-experts", "use --eplb-config"),
    OtherFlag("--disable-custom-all-reduce", "the fastest of those that work here is chosen: leave it out"),
    OtherFlag("--num-gpu-blocks-override", "use --num-kv-blocks"),
    _value("--swap-space", "host memory keeps KV blocks with --kv-offload-memory"),
    _value("--preemption-mode", "a preempted request is computed again", "recompute"),
    _value("--cpu-offload-gb", "weights stay on their device: use more of it by -tp, or fewer bits", "0"),
    OtherFlag("--kv-offloading-size --kv-offloading-backend", "use --kv-offload-memory and --kv-offload-dir"),
    _value("--prefix-caching-hash-algo", "blocks are compared by their token ids as well"),
    OtherFlag("--calculate-kv-scales", "use --kv-cache-dtype fp8, with scales from the checkpoint or 1"),
    _switch("--enable-chunked-prefill", "always on"),
    _switch("--async-scheduling", "steps always overlap with scheduling"),
    _value("--num-scheduler-steps", "steps always overlap with scheduling", "1"),
    _switch("--use-v2-block-manager", "there is one"),
    OtherFlag("--max-num-partial-prefills --max-long-partial-prefills", "use --long-prefill-token-threshold"),
    OtherFlag("--stream-interval", "every token is sent at once, or with those that wait for a slow reader"),
    OtherFlag("-cc -O --compilation-config --optimization-level", "use --level and --cudagraph-mode"),
    OtherFlag("--max-cudagraph-capture-size --cuda-graph-sizes --max-seq-len-to-capture", _GRAPHS),
    OtherFlag("--attention-backend", "the fastest of those that work here is chosen"),
    OtherFlag("--speculative-config", "use --method, --num-speculative-tokens and --draft-model"),
    OtherFlag("--speculative-model", _DRAFTS),
    _value("--guided-decoding-backend", "XGrammar compiles all grammars", "auto", "xgrammar"),
    OtherFlag("--structured-outputs-config", "XGrammar compiles all grammars: leave it out"),
    OtherFlag("--logits-processors", "requests set `logit_bias`, `bad_words` and `allowed_token_ids`"),
    OtherFlag("--mm-processor-kwargs --allowed-local-media-path", _IMAGES),
    OtherFlag("--enable-sleep-mode", "stop the server: converted models are kept for the next start"),
    OtherFlag("--profiler-config", "use --torch-profiler-dir"),
    OtherFlag("--collect-detailed-traces", "use --step-trace"),
)

LLAMA_CPP = (
    OtherFlag("-m", "use --model, or the path alone"),
    OtherFlag("-hf -hfr --hf-repo", _MODEL),
    OtherFlag("-hff --hf-file -mu --model-url -dr --docker-repo", _MODEL),
    OtherFlag("-hft", "set the variable HF_TOKEN"),
    OtherFlag("--offline", "set the variable HF_HUB_OFFLINE=1"),
    OtherFlag("-a --alias", "use --served-model-name"),
    OtherFlag("-c --ctx-size", "use --max-model-len, which holds for each request"),
    OtherFlag("-np --parallel", "use --max-num-seqs; all requests share the KV cache"),
    OtherFlag("-b -ub --batch-size --ubatch-size", "use --max-num-batched-tokens"),
    OtherFlag("-n --predict --n-predict", "use --default-max-tokens; requests set `max_tokens`"),
    _switch("-cb --cont-batching", _BATCHING),
    OtherFlag("-nocb --no-cont-batching", _BATCHING),
    OtherFlag("-t --threads", "use --cpu-threads"),
    OtherFlag("-tb --threads-batch", "use --cpu-threads, which holds for prompts as well"),
    OtherFlag("--threads-http", "use --api-server-count, the number of HTTP processes"),
    OtherFlag("-C --cpu-mask -Cr --cpu-range", "start atom-launch with taskset"),
    OtherFlag("--numa", "start atom-launch with numactl"),
    OtherFlag("-ngl --gpu-layers --n-gpu-layers", _DEVICE),
    OtherFlag("-cmoe --cpu-moe -ncmoe --n-cpu-moe -ot --override-tensor -dev --list-devices", _DEVICE),
    OtherFlag("-sm --split-mode -ts --tensor-split", "use --tensor-parallel-size: GPUs have equal parts"),
    OtherFlag("-mg --main-gpu", "set the variable CUDA_VISIBLE_DEVICES"),
    OtherFlag("-fit --fit --fit-target --fit-ctx", "the KV cache takes what is left: see --plan"),
    _value("-fa --flash-attn", "attention never stores its scores", "on", "auto"),
    OtherFlag("-ctk -ctv --cache-type-k --cache-type-v", _DTYPE),
    OtherFlag("-nkvo --no-kv-offload", _DEVICE),
    OtherFlag("--no-mmap --mlock -lm --load-mode", "the variable ATOM_DISABLE_MMAP=1 reads files instead"),
    OtherFlag("--swa-full", "blocks outside a sliding window are freed"),
    OtherFlag("--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx", _ROPE),
    OtherFlag("--override-kv", "use --hf-overrides, with the names of config.json"),
    OtherFlag("--no-warmup", "warming up measures the memory: --enforce-eager makes it shorter"),
    OtherFlag("-cram --cache-ram", "use --kv-cache-memory-bytes: cached prefixes are part of the KV cache"),
    OtherFlag("-kvu --kv-unified", "all requests share the KV cache: leave it out"),
    OtherFlag("--cache-prompt", "use --enable-prefix-caching, the default"),
    OtherFlag("--no-cache-prompt", "use --no-enable-prefix-caching"),
    OtherFlag("--cache-reuse", "prompts share their common prefix: leave it out"),
    OtherFlag("--context-shift", "a request ends at the context length: leave it out"),
    OtherFlag("--slot-save-path --slots --props", "there are no slots: see /metrics and the status page"),
    _switch("--metrics", "/metrics is always served"),
    _switch("--jinja", "chat templates are always Jinja"),
    OtherFlag("--no-jinja", "chat templates are always Jinja: leave it out"),
    OtherFlag("--chat-template-file", "use --chat-template, which takes a file"),
    OtherFlag("--chat-template-kwargs", "requests set `chat_template_kwargs`"),
    OtherFlag("--reasoning-format", "use --reasoning-parser; the chat template tells by default"),
    OtherFlag("-rea --reasoning --reasoning-effort", "requests set `reasoning_effort`"),
    OtherFlag("--reasoning-budget", "requests set `max_tokens`"),
    _value("--port", _PORT),
    OtherFlag("--api-key-file", "set the variable ATOM_API_KEY, with commas between keys"),
    OtherFlag("--ssl-cert-file", "use --ssl-certfile"),
    OtherFlag("--ssl-key-file", "use --ssl-keyfile"),
    OtherFlag("--cors-origins", "use --allowed-origins"),
    OtherFlag("--cors-methods --cors-headers", "use --allowed-methods, --allowed-headers"),
    OtherFlag("-to --timeout", "requests set `timeout`"),
    OtherFlag("--path --api-prefix", "let a proxy serve files, and remove the prefix of the path"),
    OtherFlag("--no-webui --no-ui", "use --disable-status-page"),
    OtherFlag("--embedding --embeddings --rerank --reranking --pooling", "models generate texts alone"),
    OtherFlag("-mm --mmproj --mmproj-url", _MMPROJ),
    OtherFlag("--lora --lora-scaled", _LORA),
    OtherFlag("-md --model-draft", _DRAFTS),
    OtherFlag("--draft --draft-n --draft-max", "use --num-speculative-tokens with --method"),
    OtherFlag("-s", "requests set `seed`"),
    OtherFlag("--temp --temperature --top-k --top-p --min-p", _REQUEST),
    OtherFlag("--repeat-penalty --presence-penalty --frequency-penalty", "requests set their penalties"),
    OtherFlag("--grammar --grammar-file -j --json-schema", "requests set `structured_outputs`"),
    OtherFlag("-v --verbose --log-verbose -lv --verbosity --log-verbosity", _LOG),
    OtherFlag("--log-disable --log-file", "the log is standard error: redirect it, or use --log-level"),
    OtherFlag("--models-dir --models-preset", "a server has one model: start one for each"),
)


def other_flags() -> dict[str, tuple[str, OtherFlag]]:
    """(the engine, the flag) by every spelling; of a spelling that both engines have, vLLM's."""
    found: dict[str, tuple[str, OtherFlag]] = {}
    for engine, flags in (("vLLM", VLLM), ("llama.cpp", LLAMA_CPP)):
        for flag in flags:
            for name in flag.names:
                found.setdefault(name, (engine, flag))
    return found


def setting_advice(name: str) -> str:
    """What to do about a setting `name` (with dashes or underscores) of another engine; empty if unknown."""
    found = other_flags().get("--" + name.replace("_", "-"))
    if found is None:
        return ""
    engine, flag = found
    return f"it is {engine}'s: " + (flag.advice if flag.accepted is None else f"leave it out, {flag.advice}")
