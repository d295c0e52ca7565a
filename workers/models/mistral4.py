"""Mistral Small 4: MLA whose queries are scaled beyond the trained length, and experts in all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import LatentDecoderLM, routing_rule
from workers.layers.moe.expert_layouts import PER_EXPERT_OR_STACKED, ExpertLayout

_DEFAULTS = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


class Mistral4ForCausalLM(LatentDecoderLM):
    """Softmax routing within the best groups; `rope_parameters` have the scale of the queries."""

    expert_layout: ClassVar[ExpertLayout] = PER_EXPERT_OR_STACKED

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        rope = {**config["rope_parameters"]}
        rope.pop(
            "partial_rotary_factor", None
        )  # of the whole head, whose features with RoPE qk_rope_head_dim has
        config = {**_DEFAULTS, **config, "rope_parameters": rope}
        rule = routing_rule(
            config,
            "softmax",
            renormalise=config["norm_topk_prob"],
            groups=config["n_group"] or 1,
            kept_groups=config["topk_group"] or 1,
        )
        super().__init__(config, rule, build, correction_bias=False)


ARCHITECTURES = {
    "Mistral4ForCausalLM": Mistral4ForCausalLM,
    "Mistral3ForConditionalGeneration": Mistral4ForCausalLM,
}
