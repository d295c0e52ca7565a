"""What the plugin uses of SGLang, read in the wheel of its version without installing it.

A check fails by the name of the file, class, member or parameter that a version lacks.
"""

from collections.abc import Iterator
from pathlib import Path

from atom.plugin.sglang.host_version import misfit
from tests.helpers.plugins.host_wheel import Interfaces, Wheel, check_wheels

_LAYER = (*("num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "sliding_window_size", "prefix"),)
_STEP = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")

INTERFACES = Interfaces(
    functions={
        "srt/distributed/parallel_state.py": {"get_tp_group": ()},
        "srt/runtime_context.py": {"get_server_args": ()},
        "srt/model_executor/forward_context.py": {"get_attn_backend": ()},
        "srt/arg_groups/model_override_base.py": {
            "resolved_view": ("server_args",),
            "attention_backends_of": ("cfg",),
        },
        "srt/plugins/__init__.py": {"load_plugins": ()},
        "srt/plugins/hook_registry.py": {"HookRegistry.register": ("target", "hook", "hook_type")},
        "srt/arg_groups/choices.py": {"ATTENTION_BACKEND_CHOICES": (), "add_attention_backend_choices": ()},
        "srt/layers/attention/attention_registry.py": {"register_attention_backend": ("name",)},
        "srt/models/registry.py": {"_ModelRegistry.register": ("package_name", "overwrite", "strict")},
        "srt/layers/radix_attention.py": {
            "RadixAttention.__init__": _LAYER,
            "RadixAttention.forward": ("q", "k", "v", "forward_batch", "save_kv_cache"),
        },
        "srt/layers/attention/base_attn_backend.py": {
            "AttentionBackend.init_forward_metadata": ("forward_batch",),
            "AttentionBackend.init_cuda_graph_state": ("max_bs", "max_num_tokens"),
            "AttentionBackend.forward": _STEP,
            "AttentionBackend.forward_extend": _STEP,
            "AttentionBackend.forward_decode": _STEP,
            "AttentionBackend.support_triton": (),
        },
        "srt/layers/logits_processor.py": {
            "LogitsProcessor.__init__": ("config", "skip_all_gather"),
            "LogitsProcessor.forward": ("input_ids", "hidden_states", "lm_head", "logits_metadata"),
        },
        "srt/mem_cache/memory_pool.py": {
            "MHATokenToKVPool._create_buffers_normal": (),
            "MLATokenToKVPool._create_buffers": (),
        },
    },
    classes={
        "srt/distributed/parallel_state.py": {
            "GroupCoordinator": ("rank_in_group", "world_size", "device_group", "all_reduce")
        },
        "srt/plugins/hook_registry.py": {"HookType": ("AROUND",)},
        "srt/models/registry.py": {"_ModelRegistry": ("models",)},
        "srt/environ.py": {"Envs": ("SGLANG_EXTERNAL_MODEL_PACKAGE",)},
        "srt/layers/radix_attention.py": {
            "RadixAttention": (
                *("tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "scaling", "layer_id"),
                *("logit_cap", "sliding_window_size", "is_cross_attention", "attn_type"),
            ),
            "AttentionType": ("DECODER",),
        },
        "srt/model_executor/forward_batch_info.py": {
            "ForwardBatch": (
                *("forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"),
                "extend_seq_lens_cpu",
            ),
            "ForwardMode": ("is_decode_or_idle", "is_extend_or_draft_extend_or_mixed"),
        },
        "srt/mem_cache/memory_pool.py": {
            "KVCache": ("size", "page_size", "dtype", "store_dtype", "device", "layer_num", "start_layer"),
            "MHATokenToKVPool": (
                *("head_num", "head_dim", "v_head_dim", "kv_cache_layout", "k_buffer", "v_buffer"),
            ),
            "MLATokenToKVPool": ("kv_buffer",),
            "ReqToTokenPool": ("req_to_token",),
        },
        "srt/mem_cache/swa_memory_pool.py": {
            "SWAKVPool": ("layers_mapping", "full_kv_pool", "swa_kv_pool", "full_to_swa_index_mapping")
        },
        "srt/model_executor/model_runner.py": {"ModelRunner": ("token_to_kv_pool", "req_to_token_pool")},
        "srt/arg_groups/fields/model.py": {
            "Model": ("model_path", "load_format", "context_length", "is_embedding")
        },
        "srt/arg_groups/fields/parallel.py": {
            "Parallel": ("tp_size", "pp_size", "ep_size", "enable_dp_attention")
        },
        "srt/arg_groups/fields/schedule.py": {"Schedule": ("page_size",)},
        "srt/arg_groups/fields/exec_.py": {
            "ExecFeatures": ("enable_memory_saver",),
            "ExecKernel": ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
            "ExecMoe": ("enable_eplb",),
            "ExecOverlap": ("enable_two_batch_overlap",),
        },
        "srt/arg_groups/fields/spec.py": {"Spec": ("speculative_algorithm",)},
        "srt/arg_groups/fields/lora.py": {"Lora": ("enable_lora",)},
        "srt/arg_groups/fields/memory.py": {"Memory": ("enable_hierarchical_cache",)},
        "srt/arg_groups/fields/disagg.py": {"Disagg": ("disaggregation_mode",)},
    },
    texts={
        "srt/plugins/__init__.py": ("sglang.srt.plugins",),
        "srt/server_args.py": ("add_attention_backend_choices", "ATTENTION_BACKEND_CHOICES"),
        "srt/layers/logits_processor.py": ("lm_head.quant_method.apply(",),
        "srt/arg_groups/overrides.py": ("attention_backends_of,", "resolved_view,"),
        "version.py": ("__version__",),
    },
)


def check_contracts(wheels: Path | None) -> dict[str, list[str]]:
    """What each wheel of the directory lacks, by its name."""
    return check_wheels(wheels, "SGLang", missing)


def missing(path: Path) -> Iterator[str]:
    """Every name that the plugin uses and the wheel lacks."""
    if problem := misfit(path.name.split("-")[1]):
        yield problem
    yield from INTERFACES.missing(Wheel(path, "sglang"))
