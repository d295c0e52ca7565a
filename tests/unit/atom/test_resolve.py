"""What is decided once checkpoint and host are known."""

import json
from dataclasses import replace
from typing import Any

import pytest

from atom.config.checkpoint import Checkpoint
from atom.config.cli import engine_config_from_kwargs
from atom.config.fields import ConfigError
from atom.config.resolve import DeviceCapabilities, Resolved, resolve

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


def test_code_of_a_checkpoint_is_asked_for_in_vain() -> None:
    (note,) = resolved(trust_remote_code=True, device="cpu", dtype="float32").notes
    assert note == "--trust-remote-code has no effect: code from a checkpoint is never run"
    assert resolved(trust_remote_code=False, device="cpu", dtype="float32").notes == []


def test_settings_that_config_json_does_not_have_are_named() -> None:
    added = replace(CHECKPOINT, dtype="float32", added_settings=["--hf-overrides adds slip"])
    assert resolved(CPU, added).notes == ["--hf-overrides adds slip"]


def test_what_the_user_chose_stays() -> None:
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
        (CPU, "auto", "float32", "this CPU has no bf16 arithmetic"),
        (CPU, "bfloat16", "bfloat16", "expect it to be slow"),
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


def test_threads_are_shared_out_among_the_ranks() -> None:
    assert resolved(FAST_CPU, tensor_parallel_size=3).config.device.cpu_threads == 2
    assert resolved(FAST_CPU, tensor_parallel_size=16).config.device.cpu_threads == 1


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        resolved(CPU, device="cuda")
    with pytest.raises(ConfigError, match="needs 3 GPUs and torch sees 2"):
        resolved(GPUS, tensor_parallel_size=3)
    assert resolved(GPUS, tensor_parallel_size=3, device="cpu", dtype="float32").config.device.device == "cpu"


def test_a_gpu_that_torch_cannot_use_is_no_silent_fallback() -> None:
    host = replace(FAST_CPU, gpu_problem="the driver is too old")
    assert resolved(host).notes == ["computing on the CPU: the driver is too old"]
    with pytest.raises(ConfigError, match="the driver is too old"):
        resolved(host, device="cuda")


def test_a_context_beyond_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 4097.* at most 4096"):
        resolved(max_model_len=4097)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_num_seqs": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 3, "cudagraph_capture_sizes": "[8, 1]"}, [8, 1]),
        ({"enforce_eager": True}, []),
        ({"cudagraph_mode": "NONE"}, []),
        ({"device": "cpu"}, []),
    ],
)
def test_sizes_of_captured_steps(options: dict[str, Any], sizes: list[int]) -> None:
    found = resolved(GPUS, **options).config.device.cudagraph_capture_sizes
    assert found is not None and json.loads(found) == sizes


def test_up_to_512_rows_are_captured_by_default() -> None:
    found = json.loads(resolved(GPUS, max_num_seqs=4000).config.device.cudagraph_capture_sizes or "")
    assert found[:5] == [1, 2, 4, 8, 16] and found[-2:] == [496, 512] and len(found) == 51


@pytest.mark.parametrize(
    ("host", "options", "named"),
    [
        (FAST_CPU, {"gpu_memory_utilization": 0.9}, "--gpu-memory-utilization"),
        (GPUS, {"gpu_memory_utilization": 0.9, "num_kv_blocks": 9}, "--gpu-memory-utilization"),
        (GPUS, {"cpu_threads": 2}, "--cpu-threads"),
        (FAST_CPU, {"enforce_eager": True}, "--enforce-eager"),
        (FAST_CPU, {"cudagraph_capture_sizes": "[1]"}, "--cudagraph-capture-sizes"),
        (FAST_CPU, {"port": 8006}, "--port"),
        (FAST_CPU, {"num_kv_blocks": 9, "kv_cache_memory_bytes": 9}, "--kv-cache-memory-bytes"),
    ],
)
def test_choices_without_effect_get_one_line(
    host: DeviceCapabilities, options: dict[str, Any], named: str
) -> None:
    (note,) = resolved(host, **options).notes
    assert note.startswith(f"{named} has no effect: ")


def test_settings_of_the_checkpoint_that_are_not_applied_are_named() -> None:
    checkpoint = replace(CHECKPOINT, ignored_defaults=["repetition_penalty=1.1"])
    assert "repetition_penalty=1.1" in resolved(FAST_CPU, checkpoint).notes[0]


def test_states_cannot_be_shared() -> None:
    stateful = replace(CHECKPOINT, model_type="qwen3_next", dtype="float32", keeps_states=True)
    made = resolved(CPU, stateful)
    assert made.config.cache.enable_prefix_caching is False
    (note,) = made.notes
    assert note.startswith("prefix caching is off: qwen3_next keeps a recurrent state")
    assert resolved(CPU, stateful, enable_prefix_caching=False).notes == []
    with pytest.raises(ConfigError, match="--enable-prefix-caching: qwen3_next keeps .*; leave it out"):
        resolved(CPU, stateful, enable_prefix_caching=True)


def test_states_depend_on_the_pieces_they_are_computed_in() -> None:
    stateful = replace(CHECKPOINT, model_type="qwen3_next", keeps_states=True)
    with pytest.raises(ConfigError, match="--batch-invariant: qwen3_next computes its recurrent states"):
        resolved(GPUS, stateful, batch_invariant=True)
