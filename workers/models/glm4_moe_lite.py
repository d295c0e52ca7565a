"""GLM-4.7-Flash: the architecture of DeepSeek V3, without groups of experts."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import DEEPSEEK_V3_DEFAULTS, LatentDecoderLM, noaux_tc_rule

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}


class Glm4MoeLiteForCausalLM(LatentDecoderLM):
    """All layers but the first have experts, the one for multi-token prediction too."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**DEEPSEEK_V3_DEFAULTS, **_DEFAULTS, **config}
        super().__init__(config, noaux_tc_rule(config), build, correction_bias=True)


MTP_FIELD = "num_nextn_predict_layers"
ARCHITECTURES = {"Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM}
