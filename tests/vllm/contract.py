"""What the plugin uses of vLLM, read in the wheels of its versions without installing them.

A check fails by the name of the file, class, member or parameter that a version lacks.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from atom.plugin.vllm.host_version import misfit
from tests.helpers.plugins.host_wheel import Interfaces, Wheel, check_wheels, members_of, without_parameters

FUNCTIONS = {
    "platforms/__init__.py": {"builtin_platform_plugins": ()},
    "utils/import_utils.py": {"resolve_obj_by_qualname": ("qualname",)},
    "logger.py": {"init_logger": ("name",)},
    "forward_context.py": {"get_forward_context": ()},
    "distributed/parallel_state.py": {"get_tp_group": ()},
    "model_executor/model_loader/utils.py": {
        "get_model_architecture": ("model_config",),
        "configure_quant_config": ("quant_config", "model_class"),
    },
    "v1/attention/backends/registry.py": {"register_backend": ("backend", "class_path")},
}
"""File -> functions or variables, with parameters."""
_CLASSES = {
    "v1/attention/backends/registry.py": {"AttentionBackendEnum": ("CUSTOM", "get_path")},
    "forward_context.py": {"ForwardContext": ("attn_metadata",)},
    "distributed/parallel_state.py": {
        "GroupCoordinator": ("rank_in_group", "world_size", "device_group", "all_reduce")
    },
    "model_executor/models/interfaces_base.py": {
        "VllmModel": ("embed_input_ids", "forward"),
        "VllmModelForTextGeneration": ("compute_logits",),
    },
    "model_executor/layers/attention/attention.py": {
        "Attention": ("num_heads", "num_kv_heads", "head_size", "forward")
    },
    "model_executor/models/registry.py": {
        "_ModelRegistry": ("models",),
        "_LazyRegisteredModel": ("load_model_cls",),
    },
    "v1/kv_cache_interface.py": {
        "KVCacheSpec": ("block_size",),
        "AttentionSpec": ("num_kv_heads", "head_size", "dtype"),
        "SlidingWindowSpec": ("sliding_window",),
        "FullAttentionSpec": (),
        "MLAAttentionSpec": (),
    },
    "v1/attention/backend.py": {
        "AttentionCGSupport": ("UNIFORM_BATCH",),
        "AttentionMetadataBuilder": ("_cudagraph_support", "get_cudagraph_support"),
        "CommonAttentionMetadata": (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs"),
            *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
        ),
    },
    "config/parallel.py": {
        "ParallelConfig": (
            *("pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size"),
            *("enable_expert_parallel", "enable_eplb", "enable_dbo"),
        )
    },
    "config/model.py": {
        "ModelConfig": (
            *("model", "hf_config", "dtype", "max_model_len", "enable_prompt_embeds", "runner_type"),
            *("architectures", "get_num_attention_heads"),
        )
    },
    "config/cache.py": {"CacheConfig": ("block_size", "cache_dtype")},
    "config/load.py": {"LoadConfig": ("load_format",)},
    "config/speculative.py": {"SpeculativeConfig": ("method", "num_speculative_tokens")},
    "config/compilation.py": {
        "CompilationConfig": ("static_forward_context", "cudagraph_mode"),
        "CUDAGraphMode": ("has_piecewise_cudagraphs",),
    },
    "config/vllm.py": {
        "VllmConfig": ("additional_config", "lora_config", "speculative_config", "load_config")
    },
}
"""File -> classes, with members."""
_METHODS = {
    "platforms/interface.py": {"Platform.get_attn_backend_cls": ("selected_backend",)},
    "model_executor/models/registry.py": {"_ModelRegistry.register_model": ("model_arch", "model_cls")},
    "model_executor/layers/attention_layer_base.py": {
        "AttentionLayerBase.get_attn_backend": (),
        "AttentionLayerBase.get_kv_cache_spec": ("vllm_config",),
    },
    "model_executor/layers/attention/attention.py": {
        "Attention.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config"),
            *("logits_soft_cap", "per_layer_sliding_window", "prefix"),
        ),
    },
    "model_executor/layers/attention/chunked_local_attention.py": {
        "ChunkedLocalAttention.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config"),
            *("attention_chunk_size", "prefix"),
        ),
    },
    "v1/attention/backend.py": {
        "AttentionMetadataBuilder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "AttentionMetadataBuilder.build_for_cudagraph_capture": ("common_attn_metadata",),
        "AttentionImpl.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window"),
            *("kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
        ),
        "AttentionImpl.forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    },
}
"""File -> methods, with parameters."""
_TEXTS = {
    "plugins/__init__.py": ("vllm.general_plugins", "vllm.platform_plugins"),
    "envs.py": ("VLLM_USE_BREAKABLE_CUDAGRAPH",),
}
_BACKEND_METHODS = {"get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape"}
"""The abstract methods of a backend that ATOM's has."""
_SHAPE = ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str")


INTERFACES = Interfaces({**FUNCTIONS, **_METHODS}, _CLASSES, _TEXTS)


def check_contracts(wheels: Path | None) -> dict[str, list[str]]:
    """What each wheel of the directory lacks, by its name."""
    return check_wheels(wheels, "vLLM", missing)


def missing(path: Path) -> Iterator[str]:
    """Every name that the plugin uses and the wheel lacks."""
    if problem := misfit(path.name.split("-")[1]):
        yield problem
    wheel = Wheel(path, "vllm")
    yield from INTERFACES.missing(wheel)
    yield from _without_layout(wheel)


def _without_layout(wheel: Wheel) -> Iterator[str]:
    """The two ways to say the layout of a KV cache, of which a version has one."""
    file = "v1/attention/backend.py"
    specs = "v1/kv_cache_interface.py"
    backend = wheel.found(file, "AttentionBackend")
    assert isinstance(backend, ast.ClassDef), file
    yield from (
        f"{file}: AttentionBackend.{method.name} is abstract"
        for method in backend.body
        if isinstance(method, ast.FunctionDef)
        and "abstractmethod" in map(ast.unparse, method.decorator_list)
        and method.name not in _BACKEND_METHODS
    )
    fields = members_of(wheel.found(specs, "AttentionSpec"))
    if "get_kv_cache_shape" in members_of(backend):
        yield from without_parameters(wheel, file, {"AttentionBackend.get_kv_cache_shape": _SHAPE})
        return
    yield from (
        f"{specs}: AttentionSpec.{name}"
        for name in ("num_head_slots", "state_content_bytes")
        if name not in fields
    )
    layouts = members_of(wheel.found("v1/kv_cache_layout.py", "KVCacheLayout"))
    yield from (f"KVCacheLayout.{name}" for name in ("LBHNC", "LBNHC") if name not in layouts)
    if "supported_kv_cache_layouts" not in members_of(backend):
        yield f"{file}: AttentionBackend.supported_kv_cache_layouts"
