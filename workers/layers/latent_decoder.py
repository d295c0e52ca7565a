"""The decoder of DeepSeek's models and their like: latent attention, experts in all but the first layers."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from atom.utils import envs
from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, FeedForward, GatedMLP, Mixers, common_fields
from workers.layers.mla import LATENT_MODULES, LatentArgs, LatentAttention, latent_groups
from workers.layers.moe import MoE, MoEArgs

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class LatentDecoderLM(DecoderLM):
    """A family says how experts are chosen, and what its config.json leaves out."""

    packed_modules_mapping = {**DecoderLM.packed_modules_mapping, **LATENT_MODULES}

    def __init__(
        self, stated: Mapping[str, Any], rule: RoutingRule, build: BuildContext, correction_bias: bool
    ):
        """`stated` is config.json with the family's defaults; see `MoEArgs` for `correction_bias`."""
        stated = {**_DEFAULTS, **stated}
        _refuse(stated)
        args = decoder_args(stated)
        latent = latent_args(stated)
        groups = latent_groups(latent, args.num_hidden_layers)
        moe = moe_args(stated, rule, correction_bias)

        def mlp(layer: int) -> FeedForward:
            return MoE(moe, build) if layer >= stated["first_k_dense_replace"] else GatedMLP(args, build)

        mixers = Mixers(groups, lambda layer: LatentAttention(latent, layer, groups, build))
        super().__init__(stated, args, build, mlp, mixers)
        # Layers behind the last one predict further tokens.
        first, count = args.num_hidden_layers, stated.get("num_nextn_predict_layers") or 0
        self.unused_on_disk += tuple(f"model.layers.{layer}.*" for layer in range(first, first + count))


def decoder_args(stated: Mapping[str, Any]) -> DecoderArgs:
    """Of what is no latent's: rotation is of the rotated part of a head alone."""
    fields = common_fields({**stated, "head_dim": stated["qk_rope_head_dim"]})
    return DecoderArgs(**fields, rope_interleaved=stated.get("rope_interleave", True))


def latent_args(stated: Mapping[str, Any]) -> LatentArgs:
    """Of the attention. Raises KeyError for a missing field."""
    nope, rope = stated["qk_nope_head_dim"], stated["qk_rope_head_dim"]
    return LatentArgs(
        hidden_size=stated["hidden_size"],
        num_heads=stated["num_attention_heads"],
        q_lora_rank=stated["q_lora_rank"],
        kv_lora_rank=stated["kv_lora_rank"],
        nope_dim=nope,
        rope_dim=rope,
        v_dim=stated["v_head_dim"],
        scale=(nope + rope) ** -0.5 * _sharpening(stated["rope_parameters"]),
        bias=stated["attention_bias"],
        interleaved=stated.get("rope_interleave", True),
        fused_norms=envs.ATOM_ENABLE_DS_QKNORM_FUSION,
    )


def moe_args(stated: Mapping[str, Any], rule: RoutingRule, correction_bias: bool) -> MoEArgs:
    """Of the layers with experts. Raises KeyError for a missing field."""
    features = stated["moe_intermediate_size"]
    return MoEArgs(
        hidden_size=stated["hidden_size"],
        num_experts=stated["n_routed_experts"],
        expert_features=features,
        rule=rule,
        hidden_act=stated.get("hidden_act", "silu"),
        router_dtype=torch.float32,
        correction_bias=correction_bias,
        shared_features=(stated["n_shared_experts"] or 0) * features,
    )


def routing_rule(stated: Mapping[str, Any], scoring: str, **more: Any) -> RoutingRule:
    """The rule of fields that these families share; `more` are the family's own."""
    check_value(stated, "scoring_func", scoring)
    return RoutingRule(
        stated["num_experts_per_tok"],
        scoring,  # type: ignore[arg-type]
        scale=stated["routed_scaling_factor"],
        **more,
    )


def check_value(stated: Mapping[str, Any], name: str, *runs: object) -> None:
    """Raise ValueError for a field that is there and is none of the values that run."""
    if name in stated and stated[name] not in runs:
        these = ", ".join(map(str, runs))
        raise ValueError(
            f"{stated['model_type']} with {name} {stated[name]} is not supported; these are: {these}"
        )


def _refuse(stated: Mapping[str, Any]) -> None:
    check_value(stated, "mlp_bias", False)
    check_value(stated, "moe_layer_freq", 1)


def _sharpening(rope: Mapping[str, Any]) -> float:
    """What stretched rotation adds to the scale of scores: twice, for queries and for keys."""
    all_dim = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2)
