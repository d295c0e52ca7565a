"""Resolution of `auto` and unset fields for a checkpoint and a host."""

import json
from dataclasses import replace
from typing import Any

import pytest

from atom.shared.config.checkpoint import Checkpoint, ImageSettings
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.eplb import EPLBConfig, eplb_config
from atom.shared.config.fields import ConfigError
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.resolve import DeviceCapabilities, Resolved, resolve

CHECKPOINT = Checkpoint(
    directory="somewhere",
    architecture="LlamaForCausalLM",
    model_type="llama",
    hf_config={},
    dtype="bfloat16",
    vocab_size=100,
    max_model_len=4096,
)
CPU = DeviceCapabilities(cpu_cores=8)
FAST_CPU = replace(CPU, cpu_dtypes=["bfloat16", "float32"])
GPUS = replace(CPU, cuda=2, gpu_dtypes=["bfloat16", "float16", "float32"])
OLD_GPU = replace(CPU, cuda=1, gpu_dtypes=["float16", "float32"])


def resolved(host: DeviceCapabilities = CPU, checkpoint: Checkpoint = CHECKPOINT, **options: Any) -> Resolved:
    return resolve(engine_config_from_kwargs(**options), checkpoint, set(options), host)


def test_defaults_on_a_cpu() -> None:
    config = resolved(model="some/where").config
    assert config.device.device == "cpu"
    assert config.device.cpu_threads == 8
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (2048, 256)
    assert config.model.served_model_name == "some/where"
    assert config.model.max_model_len is None


def test_defaults_on_a_gpu() -> None:
    result = resolved(GPUS)
    config = result.config
    assert (config.device.device, config.model.dtype) == ("cuda", "bfloat16")
    assert config.device.cpu_threads is None
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (16384, 512)
    assert result.notes == []


def test_trust_remote_code_has_no_effect() -> None:
    (note,) = resolved(trust_remote_code=True, device="cpu", dtype="float32").notes
    assert note == "--trust-remote-code has no effect: code from a checkpoint is never run"
    assert resolved(trust_remote_code=False, device="cpu", dtype="float32").notes == []


def test_expert_parallelism_needs_as_many_experts_as_workers() -> None:
    options = {"enable_expert_parallel": True, "device": "cpu", "dtype": "float32"}
    experts = replace(CHECKPOINT, hf_config={"n_routed_experts": 3, "num_experts": None})
    assert resolved(CPU, experts, tensor_parallel_size=3, **options).notes == []
    with pytest.raises(ConfigError, match="the model has 3 experts for 4 workers; omit the flag"):
        resolved(CPU, experts, tensor_parallel_size=4, **options)
    with pytest.raises(ConfigError, match="--enable-expert-parallel: llama has no experts; omit the flag"):
        resolved(CPU, tensor_parallel_size=2, **options)
    (note,) = resolved(CPU, experts, **options).notes
    assert (
        note == "--enable-expert-parallel has no effect: one worker has all experts; it acts with -tp or -dp"
    )


def test_attention_per_worker_makes_every_worker_an_engine() -> None:
    options = {"enable_dp_attention": True, "device": "cpu", "dtype": "float32"}
    experts = replace(CHECKPOINT, hf_config={"num_experts": 4, "num_attention_heads": 1})
    result = resolved(CPU, experts, tensor_parallel_size=2, data_parallel_size=2, **options)
    assert result.config.parallel == ParallelConfig(
        data_parallel_size=4, enable_expert_parallel=True, enable_dp_attention=True
    )
    assert result.notes == ["--enable-dp-attention: 4 engines of one worker each, which share the experts"]
    with pytest.raises(ConfigError, match="--enable-dp-attention: llama has no experts for the engines"):
        resolved(CPU, tensor_parallel_size=2, **options)
    with pytest.raises(ConfigError, match="the model has 4 experts for 6 workers"):
        resolved(CPU, experts, tensor_parallel_size=6, **options)
    with pytest.raises(ConfigError, match="leaves each with its own: omit one"):
        resolved(CPU, experts, tensor_parallel_size=2, decode_context_parallel_size=2, **options)
    (note,) = resolved(CPU, **options).notes
    assert note == "--enable-dp-attention has no effect: there is one worker; it acts with -tp or -dp"


def test_experts_are_spread_over_the_workers_of_all_engines() -> None:
    options = {"enable_expert_parallel": True, "device": "cpu", "dtype": "float32"}
    experts = replace(CHECKPOINT, hf_config={"num_experts": 4})
    assert resolved(CPU, experts, data_parallel_size=4, **options).notes == []
    with pytest.raises(ConfigError, match="the model has 4 experts for 6 workers; omit the flag"):
        resolved(CPU, experts, tensor_parallel_size=2, data_parallel_size=3, **options)


@pytest.mark.parametrize(
    ("eplb", "options", "message"),
    [
        ("{}", {"enable_expert_parallel": False}, "--enable-eplb moves experts between ranks: use"),
        ("{}", {"tensor_parallel_size": 1}, "--enable-eplb moves experts between ranks: use"),
        ('{"use_async": true}', {}, "use_async is not supported; use window_size, step_interval, num_red"),
        ('{"window_size": 1.5}', {}, "window_size is 1.5: it must be a whole number from 0 up"),
        (
            '{"window_size": 31, "step_interval": 30}',
            {},
            "window_size 31 must be from 1 to step_interval",
        ),
        ('{"window_size": 10001, "step_interval": 20000}', {}, "step_interval, 20000, and at most 10000"),
        ('{"window_size": 8, "step_interval": 16}', {}, "step_interval 16 must be more than 16 steps"),
        ('{"num_redundant_experts": 9}', {}, "with 8 every one of 3 ranks has all 4 experts"),
    ],
)
def test_moving_experts_needs_ranks_and_sensible_numbers(
    eplb: str, options: dict[str, Any], message: str
) -> None:
    experts = replace(CHECKPOINT, hf_config={"num_experts": 4})
    flags = {"device": "cpu", "dtype": "float32", "enable_expert_parallel": True, "enable_eplb": True}
    flags |= {"tensor_parallel_size": 3, "eplb_config": eplb, **options}
    with pytest.raises(ConfigError, match=message):
        resolved(CPU, experts, **flags)


def test_moving_experts_has_defaults() -> None:
    experts = replace(CHECKPOINT, hf_config={"num_experts": 4})
    flags = {"device": "cpu", "dtype": "float32", "enable_expert_parallel": True, "tensor_parallel_size": 2}
    config = resolved(CPU, experts, enable_eplb=True, **flags).config
    assert eplb_config(config.parallel) == EPLBConfig(1000, 3000, 0)
    result = resolved(CPU, experts, eplb_config='{"window_size": 8}', **flags)
    assert result.notes == ["--eplb-config has no effect: it needs --enable-eplb"]
    assert eplb_config(result.config.parallel) is None


def test_decode_context_parallelism_needs_mla_and_equal_ranks() -> None:
    mla = {"kv_lora_rank": 512, "num_attention_heads": 128}
    checkpoint = replace(CHECKPOINT, model_type="deepseek_v3", hf_config=mla)
    options = {"device": "cpu", "dtype": "float32", "decode_context_parallel_size": 4}
    config = resolved(CPU, checkpoint, tensor_parallel_size=8, **options).config
    assert config.block_tokens == 4 * config.cache.block_size
    with pytest.raises(ConfigError, match="-size 4 does not divide --tensor-parallel-size 6"):
        resolved(CPU, checkpoint, tensor_parallel_size=6, **options)
    with pytest.raises(ConfigError, match="KV heads of llama are split by --tensor-parallel-size: omit"):
        resolved(CPU, tensor_parallel_size=8, **options)
    sparse = replace(checkpoint, model_type="glm_moe_dsa", hf_config=mla | {"index_topk": 2048})
    with pytest.raises(ConfigError, match="glm_moe_dsa has sparse attention"):
        resolved(CPU, sparse, tensor_parallel_size=8, **options)
    recurrent = replace(checkpoint, model_type="kimi_linear", keeps_states=True)
    with pytest.raises(ConfigError, match="kimi_linear has recurrent layers"):
        resolved(CPU, recurrent, tensor_parallel_size=8, **options)
    with pytest.raises(ConfigError, match="-size 12 does not divide the 128 of the model"):
        resolved(CPU, checkpoint, tensor_parallel_size=12, **options)
    plain = options | {"decode_context_parallel_size": 1}
    assert resolved(CPU, tensor_parallel_size=2, **plain).config.block_tokens == 16


@pytest.mark.parametrize(
    ("size", "config", "message"),
    [
        (
            7,
            {"num_key_value_heads": 3},
            "7 does not fit the model's 9 query and 3 key/value heads: use 6 or 9",
        ),
        (2, {"num_key_value_heads": 1}, None),
        (12, {"num_key_value_heads": None}, "9 query and 9 key/value heads: use 9$"),
        (9, {"num_key_value_heads": 3, "kv_lora_rank": 4}, None),
        (9, {"num_key_value_heads": 3, "linear_num_key_heads": 4}, "4 heads of linear attention: use 3$"),
        (
            6,
            {"kv_lora_rank": 4, "linear_attn_config": {"num_heads": 5}},
            "5 heads of linear attention: use 5$",
        ),
        (3, {"num_key_value_heads": 1, "o_groups": 2}, "2 o_groups: use 2$"),
    ],
)
def test_workers_get_heads(size: int, config: dict[str, Any], message: str | None) -> None:
    checkpoint = replace(CHECKPOINT, hf_config={"num_attention_heads": 9} | config)
    options = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": size}
    if message is None:
        assert resolved(CPU, checkpoint, **options).config.parallel.tensor_parallel_size == size
        return
    with pytest.raises(ConfigError, match=message):
        resolved(CPU, checkpoint, **options)


def test_overrides_of_unknown_config_keys_are_named() -> None:
    added = replace(CHECKPOINT, dtype="float32", warnings=["--hf-overrides adds slip"])
    assert resolved(CPU, added).notes == ["--hf-overrides adds slip"]


@pytest.mark.parametrize(("kind", "named"), [("dynamic", True), ("longrope", True), ("yarn", False)])
def test_rope_that_is_scaled_for_the_longest_text_is_named(kind: str, named: bool) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024}
    checkpoint = replace(CHECKPOINT, dtype="float32", max_model_len=4096, hf_config={"rope_parameters": rope})
    notes = resolved(CPU, checkpoint).notes
    assert notes == ([note for note in notes if "scaled for 4096 tokens" in note] if named else [])
    assert len(notes) == named
    assert resolved(CPU, checkpoint, max_model_len=1024).notes == []


def test_explicit_values_are_kept() -> None:
    chosen = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "cpu_threads": 1, "max_model_len": 4096}
    result = resolved(FAST_CPU, served_model_name="name", **chosen)
    config = result.config
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 32)
    assert (config.device.cpu_threads, config.model.max_model_len) == (1, 4096)
    assert config.model.served_model_name == "name"
    assert result.notes == []


@pytest.mark.parametrize(
    ("host", "wanted", "given", "words"),
    [
        (FAST_CPU, "auto", "bfloat16", ""),
        (CPU, "auto", "float32", "this CPU has no bf16 instructions"),
        (CPU, "bfloat16", "bfloat16", "so it is slow"),
        (CPU, "float32", "float32", ""),
        (OLD_GPU, "auto", "float16", "this GPU has no"),
        (GPUS, "float32", "float32", ""),
    ],
)
def test_dtype(host: DeviceCapabilities, wanted: str, given: str, words: str) -> None:
    result = resolved(host, dtype=wanted)
    assert result.config.model.dtype == given
    assert len(result.notes) == bool(words)
    assert words in "".join(result.notes)


def test_cpu_threads_are_divided_by_the_number_of_workers() -> None:
    assert resolved(FAST_CPU, tensor_parallel_size=3).config.device.cpu_threads == 2
    assert resolved(FAST_CPU, tensor_parallel_size=16).config.device.cpu_threads == 1
    both = resolved(FAST_CPU, tensor_parallel_size=2, data_parallel_size=2)
    assert both.config.device.cpu_threads == 2


def test_a_narrow_model_computes_in_one_thread() -> None:
    def threads(width: int, **options: Any) -> int | None:
        return resolved(
            checkpoint=replace(CHECKPOINT, hf_config={"hidden_size": width}), **options
        ).config.device.cpu_threads

    assert (threads(64), threads(255), threads(256)) == (1, 1, 8)
    assert threads(64, cpu_threads=4) == 4


def test_missing_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        resolved(CPU, device="cuda")
    with pytest.raises(ConfigError, match="-size 1 with --data-parallel-size 3 needs 3 GPUs, torch found 2"):
        resolved(GPUS, data_parallel_size=3)
    with pytest.raises(ConfigError, match="needs 3 GPUs, torch found 2"):
        resolved(GPUS, tensor_parallel_size=3)
    assert resolved(GPUS, tensor_parallel_size=3, device="cpu", dtype="float32").config.device.device == "cpu"


def test_a_gpu_that_torch_cannot_use_is_reported() -> None:
    host = replace(FAST_CPU, gpu_problem="the driver is too old")
    assert resolved(host).notes == ["computing on the CPU: the driver is too old"]
    with pytest.raises(ConfigError, match="the driver is too old"):
        resolved(host, device="cuda")


def test_max_model_len_above_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 4097.* at most 4096"):
        resolved(max_model_len=4097)


@pytest.mark.parametrize(
    ("host", "options", "named"),
    [
        (FAST_CPU, {"level": 1, "tensor_parallel_size": 2}, "--level 1 .* use --level 3"),
        (FAST_CPU, {"level": 2, "mark_trace": True}, "--mark-trace: --level 2"),
        (GPUS, {"cudagraph_mode": "PIECEWISE", "mark_trace": True}, "--mark-trace .* PIECEWISE"),
    ],
)
def test_what_a_compiled_pass_cannot_honour_is_refused(
    host: DeviceCapabilities, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(host, **options)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_num_seqs": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 3, "cudagraph_capture_sizes": "[8, 1]"}, [8, 1]),
        ({"enforce_eager": True}, []),
        ({"cudagraph_mode": "NONE"}, []),
        ({"level": 0}, []),
        ({"level": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": "[4]"}, [4]),
        ({"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": "[4]"}, [4]),
        ({"device": "cpu"}, [*range(1, 8), 8, 10, 12, 14, *range(16, 32, 4), *range(32, 65, 8)]),
        ({"device": "cpu", "max_num_seqs": 9}, list(range(1, 10))),
        ({"device": "cpu", "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": "[4]"}, [4]),
        ({"device": "cpu", "enforce_eager": True}, []),
        ({"device": "cpu", "cudagraph_mode": "NONE"}, []),
        ({"device": "cpu", "level": 2, "cudagraph_mode": "FULL"}, []),
        ({"device": "cpu", "tensor_parallel_size": 2}, []),
    ],
)
def test_capture_sizes(options: dict[str, Any], sizes: list[int]) -> None:
    found = resolved(GPUS, **options).config.device.cudagraph_capture_sizes
    assert found is not None and json.loads(found) == sizes


def test_default_capture_sizes_go_up_to_512() -> None:
    found = json.loads(resolved(GPUS, max_num_seqs=4000).config.device.cudagraph_capture_sizes or "")
    assert found[:5] == [1, 2, 4, 8, 16] and found[-2:] == [496, 512] and len(found) == 51


@pytest.mark.parametrize(
    ("host", "options", "named"),
    [
        (FAST_CPU, {"gpu_memory_utilization": 0.9}, "--gpu-memory-utilization"),
        (GPUS, {"gpu_memory_utilization": 0.9, "num_kv_blocks": 9}, "--gpu-memory-utilization"),
        (GPUS, {"cpu_threads": 2}, "--cpu-threads"),
        (FAST_CPU, {"cudagraph_mode": "PIECEWISE"}, "--cudagraph-mode"),
        (FAST_CPU, {"cudagraph_capture_sizes": "[1]", "level": 1}, "--cudagraph-capture-sizes"),
        (FAST_CPU, {"port": 8006}, "--port"),
        (FAST_CPU, {"num_kv_blocks": 9, "kv_cache_memory_bytes": 9}, "--kv-cache-memory-bytes"),
        (FAST_CPU, {"kv_transfer_host": "10.0.0.7"}, "--kv-transfer-host"),
        (FAST_CPU, {"kv_transfer_port": 7000}, "--kv-transfer-port"),
        (FAST_CPU, {"kv_transfer_peers": "10.0.0.7"}, "--kv-transfer-peers"),
    ],
)
def test_explicit_settings_without_effect_get_one_line(
    host: DeviceCapabilities, options: dict[str, Any], named: str
) -> None:
    (note,) = resolved(host, **options).notes
    assert note.startswith(f"{named} has no effect: ")


def test_ignored_generation_config_settings_are_named() -> None:
    checkpoint = replace(CHECKPOINT, ignored_defaults=["repetition_penalty=1.1"])
    assert "repetition_penalty=1.1" in resolved(FAST_CPU, checkpoint).notes[0]


QUARK_CACHE = {
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
    "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
}


def checkpoint_stating(settings: dict[str, Any]) -> Checkpoint:
    return replace(CHECKPOINT, dtype="float32", hf_config={"quantization_config": settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}},
        {"kv_cache_quant_algo": "fp8"},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        QUARK_CACHE,
    ],
)
def test_auto_is_the_fp8_cache_that_the_checkpoint_asks_for(settings: dict[str, Any]) -> None:
    found = resolved(CPU, checkpoint_stating(settings))
    assert found.config.cache.kv_cache_dtype == "fp8"
    assert found.notes == [
        "the checkpoint asks for an FP8 KV cache: using it (--kv-cache-dtype bf16 overrides this)"
    ]
    chosen = resolved(CPU, checkpoint_stating(settings), kv_cache_dtype="bf16")
    assert chosen.config.cache.kv_cache_dtype == "bf16" and chosen.notes == []


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_scheme": None}, {"kv_cache_quant_algo": None}, {"export": {"kv_cache_group": []}},
     {"export": None}, {"quantization": None}],
)  # fmt: skip
def test_auto_stays_without_a_stated_cache(settings: dict[str, Any]) -> None:
    assert resolved(CPU, checkpoint_stating(settings)).config.cache.kv_cache_dtype == "auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "a KV cache in INT8, which is not supported"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "a KV cache in FP4, which is not supported"),
        ({"kv_cache_quant_algo": "NVFP4"}, "a KV cache in NVFP4, .*: choose --kv-cache-dtype fp8 or bf16"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": "8"}}, "kv_cache_scheme .* is not the type and"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme 'fp8' is not an object"),
        ({"kv_cache_quant_algo": 8}, "kv_cache_quant_algo 8 is not the name of a format"),
        ({"export": {"kv_cache_group": "*k_proj"}}, "kv_cache_group '.k_proj' is not a list of layers"),
        (QUARK_CACHE | {"layer_quant_config": {}}, "kv_cache_group .* is not layers of layer_quant_config"),
        (QUARK_CACHE | {"layer_quant_config": {"*v_proj": {"output_tensors": {"dtype": "int8"}}}},
         "a KV cache in int8, which is not supported"),
    ],
)  # fmt: skip
def test_other_formats_of_the_cache_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(CPU, checkpoint_stating(settings))
    if "not supported" in message:  # the stated scales are not needed
        assert resolved(CPU, checkpoint_stating(settings), kv_cache_dtype="fp8").config


def test_the_interval_of_saved_states_is_for_recurrent_layers() -> None:
    stateful = replace(CHECKPOINT, model_type="qwen3_next", dtype="float32", keeps_states=True)
    made = resolved(CPU, stateful, state_checkpoint_interval_tokens=64)
    assert made.config.cache.enable_prefix_caching and made.notes == []
    for checkpoint, options in ((CHECKPOINT, {}), (stateful, {"enable_prefix_caching": False})):
        notes = resolved(CPU, checkpoint, state_checkpoint_interval_tokens=64, **options).notes
        assert any(note.startswith("--state-checkpoint-interval-tokens has no effect") for note in notes)
    plain = replace(CHECKPOINT, dtype="float32")
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "draft_model": "p"}
    assert resolved(CPU, plain, state_checkpoint_interval_tokens=64, **drafts).notes == []


def test_tiers_of_the_cache_need_what_they_need() -> None:
    both = {"kv_offload_memory": "2G", "kv_offload_dir": "kv", "kv_offload_disk": "8G"}
    cache = resolved(CPU, **both).config.cache
    assert (cache.kv_offload_memory, cache.kv_offload_disk, cache.offloads) == (2 << 30, 8 << 30, True)
    for options, message in (
        ({"kv_offload_memory": "2G", "enable_prefix_caching": False}, "omit --no-enable-prefix-caching"),
        ({"kv_offload_dir": "kv"}, "go together"),
        ({"kv_offload_disk": "8G"}, "go together"),
        (both | {"nnodes": 2, "tensor_parallel_size": 2}, "not supported on several nodes"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(CPU, **options)
    notes = resolved(CPU, kv_offload_min_tokens=64).notes
    assert any(note.startswith("--kv-offload-min-tokens has no effect") for note in notes)


def test_recurrent_layers_rule_out_batch_invariance() -> None:
    stateful = replace(CHECKPOINT, model_type="qwen3_next", keeps_states=True)
    with pytest.raises(ConfigError, match="--batch-invariant: qwen3_next computes its recurrent states"):
        resolved(GPUS, stateful, batch_invariant=True)


def test_the_ngram_lengths_default_to_one_another() -> None:
    for options, lengths in (
        ({}, (5, 5)),
        ({"prompt_lookup_max": 7}, (7, 7)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ):
        found = resolved(method="ngram", num_speculative_tokens=3, **options).config.speculative
        assert (found.prompt_lookup_min, found.prompt_lookup_max) == lengths


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 3}, "--num-speculative-tokens needs --method"),
        ({"prompt_lookup_min": 3}, "--prompt-lookup-min needs --method"),
        ({"spec_decode_adaptive": False}, "--no-spec-decode-adaptive needs --method"),
        (
            {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
            "--prompt-lookup-max is for --method ngram; omit it with --method suffix",
        ),
        ({"spec_decode_acceptance_length": 2.0}, "--spec-decode-acceptance-length needs --method"),
        ({"spec_decode_acceptance_rate": 0.0}, "--spec-decode-acceptance-rate needs --method"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "spec_decode_acceptance_length": 4.1},
            "at most 4 tokens with --num-speculative-tokens 3",
        ),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "spec_decode_acceptance_length": 2.0,
                "spec_decode_acceptance_rate": 0.5,
            },
            "say the same: omit one of them",
        ),
        ({"method": "ngram"}, "needs --num-speculative-tokens of at least 1"),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 3,
                "prompt_lookup_max": 2,
            },
            "--prompt-lookup-min 3 is greater than --prompt-lookup-max 2",
        ),
    ],
)
def test_incomplete_speculation_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(**options)


@pytest.mark.parametrize("devices", [CPU, GPUS])
def test_texts_are_looked_up_on_every_device(devices: Any) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3}
    for method in ("ngram", "suffix"):
        assert resolved(devices, method=method, **options).config.speculative.reads_text


def test_forced_acceptance_is_a_note_at_start() -> None:
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
    verified = resolved(**drafts)
    assert verified.config.speculative.forced_length is None
    assert not any("without verification" in note for note in verified.notes)
    for options in ({"spec_decode_acceptance_length": 3.0}, {"spec_decode_acceptance_rate": 0.5}):
        found = resolved(**drafts, **options)
        assert found.config.speculative.forced_length == 3.0
        assert any("without verification, 3 tokens a step" in note for note in found.notes)


def test_the_width_of_steps_adapts_where_a_graph_computes_padding() -> None:
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    assert resolved(GPUS, **drafts).config.adapts_draft_width
    assert not resolved(GPUS, **drafts, spec_decode_adaptive=False).config.adapts_draft_width
    assert not resolved(CPU, **drafts).config.adapts_draft_width


PREDICTS = replace(CHECKPOINT, mtp_layers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "draft_model"}, "--method draft_model needs --draft-model"),
        ({"method": "eagle3"}, "--method eagle3 needs --draft-model"),
        ({"method": "mtp", "draft_model": "path"}, "--draft-model: --method mtp has none"),
        ({"method": "ngram", "draft_model": "path"}, "--draft-model: --method ngram has none"),
        ({"method": None, "num_speculative_tokens": 0, "draft_model": "p"}, "--draft-model needs --method"),
        ({"method": "mtp", "num_speculative_tokens": 9}, "drafts at most 8 tokens"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "--prompt-lookup-max is for --method ngram"),
        (
            {"method": "eagle3", "draft_model": "path", "level": 2},
            "--method eagle3 with --level 2 is not supported",
        ),
    ],
)
def test_models_that_cannot_draft_are_refused(options: dict[str, Any], words: str) -> None:
    experts = replace(PREDICTS, hf_config={**PREDICTS.hf_config, "num_experts": 8})
    with pytest.raises(ConfigError, match=words):
        resolved(CPU, experts, **{"num_speculative_tokens": 2} | options)


def test_checkpoints_without_a_layer_for_multi_token_prediction() -> None:
    for layers in (0, 2):
        with pytest.raises(ConfigError, match=f"has {layers} that can be used; use --method ngram"):
            resolved(CPU, replace(CHECKPOINT, mtp_layers=layers), method="mtp", num_speculative_tokens=2)


def test_a_model_that_drafts_needs_blocks_ahead() -> None:
    found = resolved(CPU, PREDICTS, method="mtp", num_speculative_tokens=3).config.speculative
    assert (found.lookahead, found.reads_next_ids, found.prompt_lookup_max) == (2, True, None)
    found = resolved(CPU, method="draft_model", num_speculative_tokens=3, draft_model="p").config.speculative
    assert (found.lookahead, found.reads_next_ids) == (3, False)


def test_recurrent_states_may_have_drafts() -> None:
    stateful = replace(CHECKPOINT, model_type="qwen3_next", keeps_states=True)
    for capabilities in (CPU, GPUS):
        found = resolved(capabilities, stateful, method="ngram", num_speculative_tokens=3)
        assert found.config.speculative.method == "ngram"


@pytest.mark.parametrize(
    ("limits", "tokens", "rows"),
    [
        ({}, 2304, 256),
        ({"max_num_batched_tokens": 512}, 512, 56),
        ({"max_num_seqs": 1000}, 9000, 1000),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 36}, 36, 4),
    ],
)
def test_a_step_has_room_for_all_drafts(limits: dict[str, int], tokens: int, rows: int) -> None:
    scheduler = resolved(CPU, method="ngram", num_speculative_tokens=8, **limits).config.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, rows)


@pytest.mark.parametrize(("mixed", "limits"), [(16, {"max_num_seqs": 32}), (4096, {})])
def test_mixed_steps_with_room_for_no_prompt_or_more_than_a_step_are_refused(
    mixed: int, limits: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=f"--max-num-mixed-tokens {mixed} must be from .* to 2048"):
        resolved(CPU, max_num_mixed_tokens=mixed, **limits)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 4}, {}])
def test_too_small_a_step_for_drafts_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 8 has no room .* use at least"):
        resolved(CPU, method="ngram", num_speculative_tokens=8, max_num_batched_tokens=8, **limits)


def test_too_small_a_step_for_a_whole_image_is_refused() -> None:
    settings = ImageSettings(9, {}, 14, 4, 896 * 896, 1 / 255, [0.5] * 3, [0.5] * 3, sees_ahead=True)
    checkpoint = replace(CHECKPOINT, images=settings)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 259}
    with pytest.raises(ConfigError, match=r"batched-tokens 259: .* 256 tokens, and 4 of .* at least 260"):
        resolved(CPU, checkpoint, **limits)
    resolved(CPU, checkpoint, **limits | {"max_num_batched_tokens": 260})
    drafts = resolved(CPU, checkpoint, method="ngram", num_speculative_tokens=7).config.scheduler
    assert drafts.max_num_batched_tokens == 256 + 8 * drafts.max_num_seqs
    assert resolved(CPU, checkpoint, max_num_batched_tokens=300).config.scheduler.max_num_seqs == 44
    resolved(CPU, replace(checkpoint, images=replace(settings, sees_ahead=False)), **limits)
