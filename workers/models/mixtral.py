"""Mixtral: Mistral with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.attention.window import same_window
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.moe.expert_layouts import PerExpert
from workers.layers.moe.moe import MoE, MoEArgs

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}


class MixtralForCausalLM(DecoderLM):
    """The weights of the selected experts are renormalised to a sum of one."""

    renamed_on_disk: ClassVar = {"mlp": "block_sparse_moe"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(**common_fields(config), windows=same_window(config))
        moe = MoEArgs(
            hidden_size=args.hidden_size,
            num_experts=config["num_local_experts"],
            expert_features=args.intermediate_size,
            rule=RoutingRule(config["num_experts_per_tok"], "softmax", renormalise=True),
            hidden_act=args.hidden_act,
            layout=PerExpert(gate="w1", up="w3", down="w2"),
        )
        super().__init__(config, args, build, lambda layer, at: MoE(moe, at))


ARCHITECTURES = {"MixtralForCausalLM": MixtralForCausalLM}
