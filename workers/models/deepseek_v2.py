"""DeepSeek V2 and V2-Lite."""

from collections.abc import Mapping
from typing import Any

from workers.layers.config_values import check_value
from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import LatentDecoderLM, routing_rule

_DEFAULTS = {
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
}
_GREEDY = "greedy"
_IN_GROUPS = "group_limited_greedy"


class DeepseekV2ForCausalLM(LatentDecoderLM):
    """Softmax routing over all experts (greedy), or within the best groups (group_limited_greedy)."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        check_value(config, "topk_method", _GREEDY, _IN_GROUPS)
        check_value(config, "norm_topk_prob", False)
        grouped = config["topk_method"] == _IN_GROUPS
        rule = routing_rule(
            config,
            "softmax",
            groups=config["n_group"] if grouped else 1,
            kept_groups=config["topk_group"] if grouped else 1,
            group_best=1,
        )
        super().__init__(config, rule, build, correction_bias=False)


ARCHITECTURES = {"DeepseekV2ForCausalLM": DeepseekV2ForCausalLM}
