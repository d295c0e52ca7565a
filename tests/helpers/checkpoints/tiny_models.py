"""Tiny random models, saved as Hugging Face checkpoints, and transformers' outputs of them."""

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.resolve import Dtype
from atom.shared.config.scheduler import SchedulerConfig
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from workers.checkpoint.families import keeps_states
from workers.checkpoint.hf_config import read_config
from workers.checkpoint.hf_directory import normalised_config
from workers.checkpoint.image_settings import image_settings

# transformers has the class, but not under this name.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

# Tiny matrices gain nothing from threads that wait for one another on a busy machine.
torch.set_num_threads(1)

VOCAB = 160
MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class Tiny:
    """One row of the table of models: a family and its changes to the common config."""

    name: str
    model_type: str
    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.5
    """Scale of the matrices: below 1 tokens repeat, far above 1 they depend on rounding."""
    embedding: float = 0.2
    """Standard deviation of the embeddings, times their factor. Large ones make a tied model repeat its last
    token, small ones a model with norms after its blocks any token."""


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_UNTRUNCATED_ROPE = _YARN_ROPE | {"truncate": False}
_ODD_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
_MHA = {"num_key_value_heads": 4}
_MHA_TIED = {"num_key_value_heads": 4, "tie_word_embeddings": True}
_WINDOW_23 = {"use_sliding_window": True, "sliding_window": 23}
_QWEN3_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "norm_topk_prob": True,
}
_MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
_MINIMAX = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 28,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 36,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# The dense Qwen3.5 has no experts.
_QWEN3_5 = {name: value for name, value in _QWEN3_NEXT.items() if "expert" not in name and "moe" not in name}
_THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
_DEEPSEEK_YARN = _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}
# With few heads many scores are exactly 0, and which of these transformers selects is unspecified.
_INDEXED = _DEEPSEEK | {"index_topk": 16, "index_n_heads": 24, "index_head_dim": 20}
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""For families whose ids by default are outside the vocabulary."""
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA3 = _NO_TOKENS | {
    "num_hidden_layers": 3,
    "sliding_window": 22,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": _DEFAULT_ROPE,
        "full_attention": _DEFAULT_ROPE | {"rope_theta": 1e6},
    },
}
_GEMMA2 = _NO_TOKENS | {
    "sliding_window": 22,
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": 6.0,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
              "long_factor": [1.0, 1.5, 2.5, 6.0]}  # fmt: skip
_OLMO3_ROPE = {"sliding_attention": _DEFAULT_ROPE, "full_attention": _YARN_ROPE}
_OLMO3 = {
    "sliding_window": 33,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": _OLMO3_ROPE,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.25,
}
_GRANITE4 = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 100,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
}
_KIMI_LINEAR = (
    {name: value for name, value in _DEEPSEEK.items() if name != "head_dim"}
    | _NO_TOKENS
    | {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
)
_DEEPSEEK_V4 = _NO_TOKENS | {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "q_lora_rank": 36,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "o_groups": 2,
    "o_lora_rank": 20,
    "index_n_heads": 24,
    "index_head_dim": 20,
    "index_topk": 8,
    "sliding_window": 22,
    "qk_rope_head_dim": 8,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
}
_LLAMA4 = _NO_TOKENS | {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "intermediate_size": 28,
    "intermediate_size_mlp": 100,
    "attention_chunk_size": 45,
    "floor_scale": 20,
    "attn_scale": 0.5,
}
_SCOUT_ROPE = _LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0}
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20}

TINY_MODELS = [
    Tiny("llama-gqa", "llama", 11),
    Tiny("llama-mha-tied", "llama", 2, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Tiny("llama-odd-gqa", "llama", 3, {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}),
    Tiny("llama-derived-head-dim", "llama", 4, {"num_attention_heads": 6, "head_dim": None}),
    Tiny("llama-linear-rope", "llama", 5, {"rope_parameters": _LINEAR_ROPE}),
    Tiny("llama-llama3-rope", "llama", 6, {"rope_parameters": _LLAMA3_ROPE}),
    Tiny("llama-biases", "llama", 27, {"attention_bias": True, "mlp_bias": True}),
    Tiny("llama-yarn-rope", "llama", 2, {"rope_parameters": _YARN_ROPE}),
    Tiny("mistral", "mistral", 3, {"sliding_window": None}),
    Tiny("mistral-odd-gqa-dynamic-rope", "mistral", 1,
         _ODD_HEADS | {"sliding_window": None, "rope_parameters": _DYNAMIC_ROPE}),
    Tiny("mistral-window", "mistral", 2, {"sliding_window": 20}),
    Tiny("mistral-window-mha-tied", "mistral", 1, _MHA_TIED | {"sliding_window": 33}),
    Tiny("qwen2", "qwen2", 1),
    Tiny("qwen2-mha-tied", "qwen2", 2, _MHA_TIED),
    Tiny("qwen2-odd-gqa-untruncated-yarn-rope", "qwen2", 2,
         _ODD_HEADS | {"rope_parameters": _UNTRUNCATED_ROPE}),
    Tiny("qwen2-window-in-last-layers", "qwen2", 3,
         {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 21}),
    Tiny("qwen3", "qwen3", 8),
    Tiny("qwen3-mha-tied-wide-heads", "qwen3", 5, _MHA_TIED | {"head_dim": 32}),
    Tiny("qwen3-odd-gqa-biases-windows", "qwen3", 64,
         _ODD_HEADS | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 22,
                       "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    Tiny("qwen3-moe", "qwen3_moe", 3, _QWEN3_MOE),
    Tiny("qwen3-moe-dense-first-odd-gqa", "qwen3_moe", 42,
         _QWEN3_MOE | _ODD_HEADS | {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True}),
    Tiny("qwen3-moe-every-second-mha-tied-window", "qwen3_moe", 4,
         _QWEN3_MOE | _MHA_TIED | _WINDOW_23 | {"decoder_sparse_step": 2}),
    Tiny("mixtral", "mixtral", 2, _MIXTRAL),
    Tiny("mixtral-odd-gqa-tied", "mixtral", 1, _MIXTRAL | _ODD_HEADS | {"tie_word_embeddings": True}),
    Tiny("mixtral-window-mha", "mixtral", 2, _MIXTRAL | {"sliding_window": 24, "num_key_value_heads": 4}),
    Tiny("minimax-m2", "minimax_m2", 3, _MINIMAX),
    Tiny("minimax-m2-odd-gqa-tied", "minimax_m2", 1, _MINIMAX | _ODD_HEADS | {"tie_word_embeddings": True}),
    Tiny("minimax-m2-mha", "minimax_m2", 2, _MINIMAX | {"num_key_value_heads": 4}),
    Tiny("glm4-moe", "glm4_moe", 1, _GLM4_MOE),
    Tiny("glm4-moe-norms-groups-mha", "glm4_moe", 1,
         _GLM4_MOE | {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 4, "n_group": 4,
                      "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False}),
    Tiny("glm4-moe-odd-gqa-tied", "glm4_moe", 1,
         _GLM4_MOE | _ODD_HEADS | {"tie_word_embeddings": True, "first_k_dense_replace": 2}),
    Tiny("deepseek-v2-lite", "deepseek_v2", 1,
         _DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.0}),
    Tiny("deepseek-v2-groups-yarn", "deepseek_v2", 1,
         _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                      "rope_parameters": _DEEPSEEK_YARN}),
    Tiny("deepseek-v2-odd-heads-biases-tied", "deepseek_v2", 1,
         _DEEPSEEK | _THREE_HEADS | {"first_k_dense_replace": 2, "attention_bias": True,
                                     "tie_word_embeddings": True, "v_head_dim": 24}),
    Tiny("deepseek-v3", "deepseek_v3", 1, _DEEPSEEK | {"n_group": 4, "topk_group": 2}),
    Tiny("deepseek-v3-yarn-odd-heads", "deepseek_v3", 2,
         _DEEPSEEK | _THREE_HEADS | {"rope_parameters": _DEEPSEEK_YARN, "first_k_dense_replace": 2,
                                     "norm_topk_prob": False, "n_shared_experts": 2}),
    Tiny("deepseek-v3-biases-halves-tied", "deepseek_v3", 1,
         _DEEPSEEK | {"attention_bias": True, "tie_word_embeddings": True, "rope_interleave": False,
                      "v_head_dim": 36, "first_k_dense_replace": 0}),
    Tiny("deepseek-v3.2", "deepseek_v32", 2, _INDEXED | {"n_group": 4, "topk_group": 2}),
    Tiny("deepseek-v3.2-yarn-odd-heads-biases", "deepseek_v32", 1,
         _INDEXED | _THREE_HEADS | {"rope_parameters": _DEEPSEEK_YARN, "attention_bias": True,
                                    "index_n_heads": 19, "index_head_dim": 8, "index_topk": 33,
                                    "norm_topk_prob": False, "first_k_dense_replace": 2}),
    Tiny("glm-5", "glm_moe_dsa", 2,
         _INDEXED | {"num_hidden_layers": 4, "index_topk_freq": 2, "v_head_dim": 28}),
    Tiny("glm-5-pattern-tied", "glm_moe_dsa", 1,
         _INDEXED | {"index_topk_pattern": "FSS", "tie_word_embeddings": True, "n_shared_experts": 2,
                     "mlp_layer_types": ["dense", "sparse", "dense"]}),
    Tiny("glm-4.7-flash", "glm4_moe_lite", 1, _DEEPSEEK),
    Tiny("glm-4.7-flash-odd-heads-biases-tied", "glm4_moe_lite", 1,
         _DEEPSEEK | _THREE_HEADS | {"attention_bias": True, "tie_word_embeddings": True, "v_head_dim": 28,
                                     "norm_topk_prob": False, "n_shared_experts": 2,
                                     "mlp_layer_types": ["dense", "sparse", "dense"]}),
    Tiny("mistral-small-4", "mistral4", 1,
         _DEEPSEEK | {"rope_parameters": _DEEPSEEK_YARN | {"llama_4_scaling_beta": 0.5}, "head_dim": 28,
                      "first_k_dense_replace": 0, "norm_topk_prob": True}),
    Tiny("mistral-small-4-odd-heads-biases-tied", "mistral4", 1,
         _DEEPSEEK | _THREE_HEADS | {"rope_parameters": _DEEPSEEK_YARN | {"llama_4_scaling_beta": 0.1},
                                     "head_dim": 28,
                                     "attention_bias": True, "tie_word_embeddings": True, "v_head_dim": 28,
                                     "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
                                     "norm_topk_prob": False}),
    Tiny("gpt-oss", "gpt_oss", 2, _GPT_OSS),
    Tiny("gpt-oss-odd-gqa-untruncated-yarn-rope", "gpt_oss", 1,
         _GPT_OSS | _ODD_HEADS | {"num_hidden_layers": 4, "rope_parameters": _UNTRUNCATED_ROPE}),
    Tiny("gpt-oss-mha-tied-windows-everywhere", "gpt_oss", 3,
         _GPT_OSS | _MHA_TIED | {"sliding_window": 33, "attention_bias": False,
                                 "layer_types": ["sliding_attention"] * 3}),
    Tiny("qwen3-next", "qwen3_next", 1, _QWEN3_NEXT),
    Tiny("qwen3-next-odd-heads-biases", "qwen3_next", 1,
         _QWEN3_NEXT | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
                        "attention_bias": True, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
                        "mlp_only_layers": [0], "norm_topk_prob": False}),
    Tiny("qwen3-next-every-second-mha-tied", "qwen3_next", 1,
         _QWEN3_NEXT | _MHA_TIED | {"num_hidden_layers": 5, "decoder_sparse_step": 2,
                                    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3,
                                    "layer_types": ["full_attention", "linear_attention"] * 2
                                                   + ["linear_attention"]}),
    Tiny("smollm3", "smollm3", 1, _NO_TOKENS | _MHA_TIED | {"num_hidden_layers": 4}),
    Tiny("smollm3-odd-gqa-biases-windows", "smollm3", 1,
         _NO_TOKENS | _ODD_HEADS | {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True,
                                    "sliding_window": 22, "no_rope_layers": [0, 1, 0]}),
    Tiny("gemma2", "gemma2", 1, _GEMMA2 | _MHA_TIED),
    Tiny("gemma2-odd-gqa-biases-windows", "gemma2", 2,
         _GEMMA2 | _ODD_HEADS | {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 33,
                                 "final_logit_softcapping": None, "attn_logit_softcapping": 4.0,
                                 "layer_types": ["full_attention"] + ["sliding_attention"] * 2},
         embedding=1.0),
    Tiny("gemma3", "gemma3_text", 6, _GEMMA3 | _MHA_TIED),
    Tiny("gemma3-odd-gqa-biases-linear-rope", "gemma3_text", 8,
         _GEMMA3 | _ODD_HEADS | {"attention_bias": True, "query_pre_attn_scalar": 2, "num_hidden_layers": 4,
                                 "tie_word_embeddings": False,
                                 "layer_types": ["sliding_attention", "full_attention"] * 2,
                                 "rope_parameters": {"sliding_attention": _DEFAULT_ROPE,
                                                     "full_attention": _LINEAR_ROPE}}),
    Tiny("phi3", "phi3", 2, _NO_TOKENS | _MHA | {"rope_parameters": _PARTIAL_ROPE}),
    Tiny("phi3-odd-gqa-tied-window-longrope", "phi3", 1,
         _NO_TOKENS | _ODD_HEADS | {"tie_word_embeddings": True, "sliding_window": 22,
                                    "original_max_position_embeddings": 4,
                                    "rope_parameters": _LONG_ROPE}),
    Tiny("granite", "granite", 1, _NO_TOKENS | _MHA | _GRANITE),
    Tiny("granite-odd-gqa-biases-tied", "granite", 3,
         _NO_TOKENS | _GRANITE | _ODD_HEADS | {"attention_bias": True, "mlp_bias": True,
                                               "tie_word_embeddings": True}, scale=2.0),
    Tiny("granite4", "granitemoehybrid", 1, _NO_TOKENS | _MHA | _GRANITE | _GRANITE4),
    Tiny("granite4-odd-gqa-biases-tied-without-rope", "granitemoehybrid", 17,
         _NO_TOKENS | _GRANITE | _GRANITE4 | _ODD_HEADS
         | {"attention_bias": True, "tie_word_embeddings": True, "position_embedding_type": "nope"},
         scale=2.0),
    Tiny("olmo2", "olmo2", 3, _NO_TOKENS | _MHA, embedding=1.5),
    Tiny("olmo2-odd-gqa-biases", "olmo2", 4, _NO_TOKENS | _ODD_HEADS | {"attention_bias": True},
         embedding=1.5),
    Tiny("olmo3", "olmo3", 3, _NO_TOKENS | _MHA | _OLMO3, embedding=1.5),
    Tiny("olmo3-odd-gqa-biases", "olmo3", 2, _NO_TOKENS | _ODD_HEADS | _OLMO3 | {"attention_bias": True},
         embedding=1.5),
    Tiny("ministral", "ministral", 1,
         _NO_TOKENS | _MHA | {"sliding_window": 22, "num_hidden_layers": 4,
                              "layer_types": ["full_attention", "sliding_attention"] * 2}),
    Tiny("ministral-odd-gqa-tied", "ministral", 1,
         _NO_TOKENS | _ODD_HEADS | {"sliding_window": 33, "tie_word_embeddings": True,
                                    "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    Tiny("ministral3", "ministral3", 1,
         _NO_TOKENS | _MHA | {"rope_parameters": _YARN_ROPE | {"llama_4_scaling_beta": 0.5}}),
    Tiny("ministral3-odd-gqa-tied-window", "ministral3", 1,
         _NO_TOKENS | _ODD_HEADS | {"tie_word_embeddings": True, "sliding_window": 22,
                                    "rope_parameters": _YARN_ROPE | {"llama_4_scaling_beta": 0.1}}),
    Tiny("qwen3.5", "qwen3_5_text", 1, _QWEN3_5),
    Tiny("qwen3.5-odd-heads-biases", "qwen3_5_text", 1,
         _QWEN3_5 | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
                     "attention_bias": True, "linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    Tiny("qwen3.5-every-second-mha-tied", "qwen3_5_text", 1,
         _QWEN3_5 | _MHA_TIED | {"num_hidden_layers": 5, "linear_num_value_heads": 6,
                                 "linear_conv_kernel_dim": 3,
                                 "layer_types": ["full_attention", "linear_attention"] * 2
                                                + ["linear_attention"]}),
    Tiny("kimi-linear", "kimi_linear", 1, _KIMI_LINEAR | {"q_lora_rank": None}, scale=1.0),
    Tiny("kimi-linear-odd-heads", "kimi_linear", 2,
         _KIMI_LINEAR | _THREE_HEADS | {"linear_num_heads": 3, "linear_conv_kernel_dim": 3, "n_group": 4,
                                        "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False,
                                        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
         scale=1.2),
    Tiny("deepseek-v4", "deepseek_v4", 1, _DEEPSEEK_V4),
    Tiny("llama4", "llama4_text", 1, _LLAMA4 | {"rope_parameters": _SCOUT_ROPE}),
    Tiny("llama4-odd-gqa-biases-dense", "llama4_text", 2,
         _LLAMA4 | _ODD_HEADS | {"attention_bias": True, "use_qk_norm": False, "interleave_moe_layer_step": 2,
                                 "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0],
                                 "tie_word_embeddings": True, "attention_chunk_size": 24,
                                 "layer_types": ["full_attention", "chunked_attention"] * 2}),
    Tiny("llama4-mha-chunks-everywhere", "llama4_text", 6,
         _LLAMA4 | _MHA | {"num_hidden_layers": 3, "layer_types": ["chunked_attention"] * 3}),
    Tiny("qwen3.5-moe", "qwen3_5_moe_text", 2, _QWEN3_NEXT),
    Tiny("qwen3.5-moe-odd-heads-biases", "qwen3_5_moe_text", 1,
         _QWEN3_NEXT | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
                        "attention_bias": True, "linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    Tiny("qwen3.5-moe-mha-tied", "qwen3_5_moe_text", 1,
         _QWEN3_NEXT | _MHA_TIED | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}),
]  # fmt: skip


def tiny(name: str) -> Tiny:
    """The row of that name."""
    return next(model for model in TINY_MODELS if model.name == name)


def tiny_config(model: Tiny) -> Any:
    """The row's config as transformers reads it."""
    # The config modifies its arguments.
    return AutoConfig.for_model(model.model_type, **deepcopy({**_COMMON, **model.config}))


_SAVED: dict[str, tuple[torch.nn.Module, dict[str, bytes]]] = {}
"""Models and the contents of their files, for `save_tiny`."""
_MOST_SAVED = 8


def build_tiny(model: Tiny) -> torch.nn.Module:
    """The transformers model, float32. Weights are large enough that tokens differ clearly."""
    config = tiny_config(model)
    # Eager experts: results of fused ones on the CPU differ by version.
    config._experts_implementation = "eager"
    torch.manual_seed(model.seed)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif weight.dim() > 1:
                weight.normal_(
                    0,
                    model.embedding / _embedding_scale(built)
                    if "embed" in name
                    else model.scale * weight.shape[-1] ** -0.5,
                )
            elif name.endswith("sinks"):
                weight.normal_(0, 2)
            elif name.endswith("A_log"):
                weight.uniform_(-4, -1)  # decays over dozens of tokens
            elif not weight.any():
                weight.uniform_(-0.5, 0.5)  # a zero-centred norm
            else:
                weight.uniform_(0.5, 1.5)
        for name, buffer in built.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
            elif name.endswith("tid2eid"):
                first_V = torch.randint(config.n_routed_experts, (len(buffer), 1))
                buffer.copy_((first_V + torch.arange(buffer.shape[1]) * 3) % config.n_routed_experts)
    return built


def _embedding_scale(model: torch.nn.Module) -> float:
    """The factor by which the model multiplies its embeddings."""
    of_gemma = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    return float(getattr(model.config, "embedding_multiplier", of_gemma))


def save_tiny(model: Tiny, directory: Path, shard_size: str = "5GB") -> tuple[torch.nn.Module, Checkpoint]:
    """Saves the model in `directory`; returns it, not to be changed, with its `Checkpoint`.

    The last few models are made once.
    """
    key = f"{model}, {shard_size}"
    if key not in _SAVED:
        built = build_tiny(model)
        with TemporaryDirectory() as made:
            built.save_pretrained(made, max_shard_size=shard_size)
            _SAVED[key] = built, {path.name: path.read_bytes() for path in Path(made).iterdir()}
        while len(_SAVED) > _MOST_SAVED:
            del _SAVED[next(iter(_SAVED))]
    built, files = _SAVED[key]
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return built, checkpoint_of(directory)


def checkpoint_of(directory: Path) -> Checkpoint:
    """The result of the preparation step for a saved tiny model."""
    config = normalised_config(read_config(directory, {}), directory)
    images, no_images = image_settings(directory, config)
    return Checkpoint(
        directory=str(directory),
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype="float32",
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        keeps_states=keeps_states(config["model_type"]),
        images=images,
        no_images=no_images,
    )


def engine_config(
    tp: int = 1,
    block_size: int = 4,
    kv_cache_dtype: str = "auto",
    load_dummy: bool = False,
    dtype: Dtype = "float32",
) -> EngineConfig:
    """A resolved configuration for the CPU."""
    return EngineConfig(
        model=ModelConfig(dtype=dtype, max_model_len=MAX_MODEL_LEN, load_dummy=load_dummy),
        cache=CacheConfig(
            block_size=block_size, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=1 << 24
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
        parallel=ParallelConfig(tensor_parallel_size=tp),
        device=DeviceConfig(device="cpu", cpu_threads=1, cudagraph_capture_sizes="[]"),
    )


def place(rank: int = 0, size: int = 1) -> Mesh:
    """A tensor-parallel rank on the CPU without a process group: enough to shard weights."""
    return Mesh(torch.device("cpu"), tp=Communicator(rank, size))


def hf_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, VOCAB] of a whole sequence."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation and its smallest top-2 margin."""

    ids: list[int]
    smallest_margin: float
    """Smallest top-2 margin of the logits over all steps."""


def hf_greedy(model: torch.nn.Module, prompt: list[int], count: int, min_margin: float = 0.0) -> Greedy:
    """Each token is the likeliest by a forward pass over the whole sequence, without a cache.

    Decoding with a cache drafts the tokens that such a pass verifies, all at once. Ends early where the top-2
    margin is at most `min_margin`.
    """
    ids = list(prompt)
    margins: list[float] = []
    while len(margins) < count:
        drafts = _hf_drafts(model, ids, count - len(margins))
        for logits_V, draft in zip(hf_logits(model, ids + drafts[:-1])[len(ids) - 1 :], drafts, strict=True):
            best = logits_V.topk(2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            if margins[-1] <= min_margin:
                return Greedy(ids[len(prompt) :], min(margins))
            if ids[-1] != draft:
                break
    return Greedy(ids[len(prompt) :], min(margins))


def _hf_drafts(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, decoded with a cache."""
    drafts: list[int] = []
    new, past = ids, None
    with torch.no_grad():
        for _ in range(count):
            found = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            past = found.past_key_values
            new = [int(found.logits[0, -1].argmax())]
            drafts += new
    return drafts


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids, the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
