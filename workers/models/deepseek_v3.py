"""DeepSeek V3, V3.1 and R1, and what shares their graph (Kimi-K2, Moonlight)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.latent_decoder import LatentDecoderLM, check_value, routing_rule

_DEFAULTS = {
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


class DeepseekV3ForCausalLM(LatentDecoderLM):
    """Experts are chosen by sigmoid scores with a correction, in the best groups."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        check_value(stated, "topk_method", "noaux_tc")
        rule = routing_rule(
            stated,
            "sigmoid",
            renormalise=stated["norm_topk_prob"],
            groups=stated["n_group"] or 1,
            kept_groups=stated["topk_group"] or 1,
        )
        super().__init__(stated, rule, build, correction_bias=True)


ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
