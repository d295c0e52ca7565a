"""The options of `LLMEngine` and `AsyncLLMEngine`, but for `model`. `make docs` writes this file.

docs/use/flags.md explains each one.
"""

import os
from typing import Any, Literal, TypedDict

__all__ = ["EngineOptions"]


class EngineOptions(TypedDict, total=False):
    """Fields of the configuration classes, with the types that they accept."""

    # ModelConfig
    revision: str | None
    download_dir: str | os.PathLike[str] | None
    served_model_name: str | list[str] | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    max_model_len: int | None
    hf_overrides: str | dict[str, Any] | None
    online_quant_config: str | dict[str, Any] | None
    limit_mm_per_prompt: str | dict[str, Any] | None
    trust_remote_code: bool
    load_dummy: bool
    # CacheConfig
    block_size: int
    kv_cache_dtype: Literal["auto", "bf16", "fp8"]
    enable_prefix_caching: bool
    state_checkpoint_interval_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | str | None
    num_kv_blocks: int | None
    kv_offload_memory: int | str | None
    kv_offload_dir: str | None
    kv_offload_disk: int | str | None
    kv_offload_remote_url: str | None
    kv_offload_remote: int | str | None
    kv_offload_min_tokens: int
    kv_offload_shared: bool
    kv_transfer_config: str | dict[str, Any] | None
    kv_transfer_host: str
    kv_transfer_port: int
    kv_transfer_peers: str | list[str]
    kv_events_config: str | dict[str, Any] | None
    # SchedulerConfig
    max_num_batched_tokens: int | None
    max_num_mixed_tokens: int | None
    long_prefill_token_threshold: int
    max_num_seqs: int | None
    max_queue_time: float | None
    scheduling_policy: Literal["fcfs", "priority"]
    fair_share: bool
    scheduler_delay_factor: float
    # ParallelConfig
    tensor_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    enable_dp_attention: bool
    all2all_backend: Literal["auto", "allgather_reducescatter", "alltoall", "mori"]
    enable_eplb: bool
    eplb_config: str | dict[str, Any] | None
    prefill_engines: int
    prefill_min_tokens: int
    dp_load_balance: Literal["prefix", "least_tokens", "least_requests", "round_robin"]
    nnodes: int
    port: int | None
    # DeviceConfig
    device: Literal["auto", "cpu", "cuda"]
    cpu_threads: int | None
    enforce_eager: bool
    level: int
    cudagraph_mode: Literal["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"]
    cudagraph_capture_sizes: str | None
    batch_invariant: bool
    # ObservabilityConfig
    log_level: Literal["debug", "info", "warning", "error"]
    step_trace: str | os.PathLike[str] | None
    flight_recorder: Literal["off", "shapes", "ids"]
    torch_profiler_dir: str | os.PathLike[str] | None
    mark_trace: bool
    # ReliabilityConfig
    hang_timeout: float
    step_timeout: float
    max_restarts: int
    max_replays: int
    orphan_grace: float
    # SpeculativeConfig
    method: Literal["ngram", "suffix", "mtp", "draft_model", "eagle3", "dflash", "dspark"] | None
    num_speculative_tokens: int
    prompt_lookup_max: int | None
    prompt_lookup_min: int | None
    spec_decode_adaptive: bool
    draft_model: str | None
    spec_decode_acceptance_length: float | None
    spec_decode_acceptance_rate: float | None
