"""The first layers of published models: every width is theirs, and weights take less than 30 GB.

The numbers follow config.json in the Hugging Face repository that a family names; those of DeepSeek-V4,
GLM-5.2, Kimi-Linear, MiniMax-M2 and Qwen3.5 were compared with the defaults of their classes in transformers
5.23. Where the published layers begin with several dense ones, there may be fewer here, so that some have
experts.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "Family"]

_FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip
_INT4_GROUPS = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
}  # fmt: skip
_INT4_EXPERTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_GROUPS, "input_activations": None,
                                  "output_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
_COMMON = {"num_hidden_layers": 4, "dtype": "bfloat16", "max_position_embeddings": 4096, "eos_token_id": 1}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_THREE_SLIDING = [*[_SLIDING] * 3, _FULL]
_THREE_LINEAR = [*[_LINEAR] * 3, _FULL]
_GATED_DELTA_NET = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": _THREE_LINEAR, "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model of a family."""

    source: str
    """The repository on the Hugging Face hub with its config.json."""
    config: dict[str, Any]
    """config.json, with fewer layers."""

    @property
    def experts_per_token(self) -> int:
        """0: it has no experts."""
        return self.config.get("num_experts_per_tok") or self.config.get("num_experts_per_token") or 0


def _family(source: str, model_type: str, architecture: str, /, **config: Any) -> Family:
    named = {"model_type": model_type, "architectures": [architecture]}
    return Family(source, {**_COMMON, **named, **config})


def _sizes(hidden: int, features: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": features,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

FAMILIES = {
    "gemma2": _family(
        "google/gemma-2-9b-it", "gemma2", "Gemma2ForCausalLM",
        **_sizes(3584, 14336, 16, 8, 256000), head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0,
    ),
    "gemma3": _family(
        "google/gemma-3-12b-it", "gemma3_text", "Gemma3ForCausalLM",
        **_sizes(3840, 15360, 16, 8, 262208), head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        sliding_window_pattern=6, num_hidden_layers=6, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "llama4": _family(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_text", "Llama4ForCausalLM",
        **_sizes(5120, 8192, 40, 8, 202048), head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192, use_qk_norm=True,
        rope_theta=500000.0, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
    ),
    "deepseek_v4": _family(
        "deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4", "DeepseekV4ForCausalLM",
        vocab_size=129280, hidden_size=4096, moe_intermediate_size=2048, num_attention_heads=64,
        num_key_value_heads=1, head_dim=512, q_lora_rank=1024, qk_rope_head_dim=64, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=6, scoring_func="sqrtsoftplus", norm_topk_prob=True,
        # All three kinds of layers; the compressed ones alternate.
        routed_scaling_factor=1.5, compress_ratios=[0, 4, 128, 4], num_hash_layers=3, hc_mult=4,
        hc_sinkhorn_iters=20, hc_eps=1e-6, swiglu_limit=10.0, sliding_window=128, o_groups=8,
        o_lora_rank=1024,
        index_n_heads=64, index_head_dim=128, index_topk=512, rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=None, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
        expert_dtype="fp4",
        quantization_config={**_FP8_BLOCKS, "scale_fmt": "ue8m0"},
    ),
    "minimax_m2": _family(
        "MiniMaxAI/MiniMax-M2", "minimax_m2", "MiniMaxM2ForCausalLM",
        **_sizes(3072, 1536, 48, 8, 200064), head_dim=128, rotary_dim=64, num_local_experts=256,
        num_experts_per_tok=8, rope_theta=5000000.0, rms_norm_eps=1e-6, hidden_act="silu",
        tie_word_embeddings=False, quantization_config=_FP8_BLOCKS,
    ),
    "glm4_moe_lite": _family(
        "zai-org/GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
        **_sizes(2048, 10240, 20, 20, 154880), **_LATENT, q_lora_rank=768, qk_nope_head_dim=192,
        v_head_dim=256,
        first_k_dense_replace=1, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1,
        num_experts_per_tok=4, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8,
        rope_theta=1000000.0, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
    ),
    "mistral4": _family(
        "mistralai/Mistral-Small-4-119B-2603", "mistral4", "Mistral4ForCausalLM",
        **_sizes(4096, 12288, 32, 32, 131072), head_dim=128, kv_lora_rank=256, qk_rope_head_dim=64,
        q_lora_rank=1024, qk_nope_head_dim=64, v_head_dim=128, first_k_dense_replace=0,
        moe_intermediate_size=2048, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=4,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, rms_norm_eps=1e-6,
        hidden_act="silu", tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "glm_moe_dsa": _family(
        "zai-org/GLM-5.2-FP8", "glm_moe_dsa", "GlmMoeDsaForCausalLM",
        **_sizes(6144, 12288, 64, 64, 154880), **_LATENT, q_lora_rank=2048, qk_nope_head_dim=192,
        v_head_dim=256,
        # Published are three dense layers.
        first_k_dense_replace=2, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        index_topk=2048, index_head_dim=128, index_n_heads=32, rope_theta=1000000.0, rms_norm_eps=1e-5,
        hidden_act="silu", tie_word_embeddings=False, quantization_config=_FP8_BLOCKS,
    ),
    "kimi_linear": _family(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi_linear", "KimiLinearForCausalLM",
        **_sizes(2304, 9216, 32, 32, 163840), **_LATENT, q_lora_rank=None, qk_nope_head_dim=128,
        v_head_dim=128,
        mla_use_nope=True, first_k_dense_replace=1, moe_intermediate_size=1024, num_experts=256,
        num_shared_experts=1, num_experts_per_token=8, num_expert_group=1, topk_group=1, moe_renormalize=True,
        moe_router_activation_func="sigmoid", routed_scaling_factor=2.446, rms_norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=False,
        linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 32,
        "head_dim": 128,
                            "short_conv_kernel_size": 4},
    ),
    # The text model alone.
    "kimi_k25": _family(
        "moonshotai/Kimi-K2.5", "kimi_k2", "DeepseekV3ForCausalLM",
        **_sizes(7168, 18432, 64, 64, 163840), **_LATENT, q_lora_rank=1536, qk_nope_head_dim=128,
        v_head_dim=128,
        # Published is one dense layer.
        first_k_dense_replace=2, moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1,
        num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True, scoring_func="sigmoid",
        topk_method="noaux_tc", routed_scaling_factor=2.827, rope_theta=50000.0, rms_norm_eps=1e-5,
        hidden_act="silu", tie_word_embeddings=False, quantization_config=_INT4_EXPERTS,
    ),
    "qwen3_next": _family(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", "Qwen3NextForCausalLM",
        **_sizes(2048, 5120, 16, 2, 151936), **_GATED_DELTA_NET, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], rope_theta=10000000.0, hidden_act="silu",
        tie_word_embeddings=False,
    ),
    "qwen3_5": _family(
        "Qwen/Qwen3.5-9B", "qwen3_5_text", "Qwen3_5ForCausalLM",
        **_sizes(4096, 12288, 16, 4, 248320), **_GATED_DELTA_NET, rope_theta=10000000.0, hidden_act="silu",
        tie_word_embeddings=False,
    ),
    "qwen3_5_moe": _family(
        "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
        **_sizes(2048, 5120, 16, 2, 248320), **_GATED_DELTA_NET, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, rope_theta=10000000.0,
        hidden_act="silu", tie_word_embeddings=False,
    ),
    "olmo3": _family(
        "allenai/Olmo-3-7B-Instruct", "olmo3", "Olmo3ForCausalLM",
        **_sizes(4096, 11008, 32, 32, 100278), sliding_window=4096, layer_types=_THREE_SLIDING,
        rope_theta=500000.0, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
    ),
    "smollm3": _family(
        "HuggingFaceTB/SmolLM3-3B", "smollm3", "SmolLM3ForCausalLM",
        **_sizes(2048, 11008, 16, 4, 128256), no_rope_layer_interval=4, rope_theta=5000000.0,
        rms_norm_eps=1e-6,
        hidden_act="silu", tie_word_embeddings=True,
    ),
    "granite": _family(
        "ibm-granite/granite-3.3-8b-instruct", "granite", "GraniteForCausalLM",
        **_sizes(4096, 12800, 32, 8, 49159), embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.0078125, logits_scaling=16.0, rope_theta=10000000.0, rms_norm_eps=1e-5,
        hidden_act="silu", tie_word_embeddings=True,
    ),
    "granitemoehybrid": _family(
        "ibm-granite/granite-4.0-1b", "granitemoehybrid", "GraniteMoeHybridForCausalLM",
        **_sizes(2048, 4096, 16, 4, 100352), shared_intermediate_size=4096, num_local_experts=0,
        layer_types=["attention"] * 4, position_embedding_type="rope", embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=8.0, rope_theta=10000000.0,
        rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
    ),
    "phi3": _family(
        "microsoft/Phi-3.5-mini-instruct", "phi3", "Phi3ForCausalLM",
        **_sizes(3072, 8192, 32, 32, 32064), sliding_window=262144, rope_theta=10000.0, rms_norm_eps=1e-5,
        hidden_act="silu", tie_word_embeddings=False,
    ),
    "phi4": _family(
        "microsoft/phi-4", "phi3", "Phi3ForCausalLM",
        **_sizes(5120, 17920, 40, 10, 100352), rope_theta=250000.0, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=False,
    ),
    "mistral_small": _family(
        "mistralai/Mistral-Small-24B-Instruct-2501", "mistral", "MistralForCausalLM",
        **_sizes(5120, 32768, 32, 8, 131072), head_dim=128, rope_theta=100000000.0, rms_norm_eps=1e-5,
        hidden_act="silu", tie_word_embeddings=False,
    ),
    "ministral3": _family(
        "mistralai/Ministral-3-8B-Instruct-2512", "ministral3", "Ministral3ForCausalLM",
        **_sizes(4096, 14336, 32, 8, 131072), head_dim=128, rope_parameters={"rope_type": "default",
        "rope_theta": 1000000.0}, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
    ),
}  # fmt: skip
"""By the name of the family."""
