"""The decoder of DeepSeek's models and their like: latent attention, experts in all but the first layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atom.utils import envs
from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, FeedForward, GatedMLP, Mixers, common_fields
from workers.layers.mla import LATENT_MODULES, LatentArgs, LatentAttention, latent_groups
from workers.layers.moe import MoE, MoEArgs
from workers.layers.sparse_mla import IndexerArgs, sparse_mixers

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CORRECTED_DEFAULTS = {
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
"""Of DeepSeek V3 and of what has its experts."""
_INDEX_DEFAULTS = {"index_head_dim": 128, "index_topk": 2048}


class LatentDecoderLM(DecoderLM):
    """A family says how experts are chosen, and what its config.json leaves out."""

    packed_modules_mapping = {**DecoderLM.packed_modules_mapping, **LATENT_MODULES}

    def __init__(
        self,
        stated: Mapping[str, Any],
        rule: RoutingRule,
        build: BuildContext,
        correction_bias: bool,
        indexer: IndexerArgs | None = None,
    ):
        """`stated` is config.json with the family's defaults; see `MoEArgs` for `correction_bias`.

        With an indexer attention is sparse.
        """
        stated = {**_DEFAULTS, **stated}
        _refuse(stated)
        args = decoder_args(stated)
        latent = latent_args(stated)
        mixers = sparse_mixers(latent, indexer, build) if indexer else _mixers(latent, args, build)
        moe = moe_args(stated, rule, correction_bias)

        def mlp(layer: int) -> FeedForward:
            return MoE(moe, build) if _has_experts(stated, layer) else GatedMLP(args, build)

        super().__init__(stated, args, build, mlp, mixers)
        # Layers behind the last one predict further tokens.
        first, count = args.num_hidden_layers, stated.get("num_nextn_predict_layers") or 0
        self.unused_on_disk += tuple(f"model.layers.{layer}.*" for layer in range(first, first + count))


class IndexedDecoderLM(LatentDecoderLM):
    """Experts as in DeepSeek V3, and sparse attention."""

    def __init__(
        self, config: Mapping[str, Any], build: BuildContext, kinds: Sequence[str], interleaved: bool
    ):
        """`config` is config.json with the family's defaults.

        `kinds` are the layers': "full" for one that chooses what it attends to, "shared" for one
        that takes over the choice before it; `interleaved` is the indexer's rotation.
        """
        stated = {**CORRECTED_DEFAULTS, **_INDEX_DEFAULTS, **config}
        check_value(stated, "rope_interleave", True)
        check_value(stated, "indexer_rope_interleave", interleaved)
        layers = stated["num_hidden_layers"]
        if len(kinds) != layers or not {"full", "shared"}.issuperset(kinds):
            raise ValueError(f"indexer_types must be full or shared for each of {layers} layers: {kinds}")
        indexer = IndexerArgs(
            heads=stated["index_n_heads"],
            width=stated["index_head_dim"],
            most=stated["index_topk"],
            interleaved=interleaved,
            chooses=[kind == "full" for kind in kinds],
        )
        super().__init__(stated, corrected_rule(stated), build, correction_bias=True, indexer=indexer)


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


def corrected_rule(stated: Mapping[str, Any]) -> RoutingRule:
    """Sigmoid scores with a correction, in the best groups: the rule of DeepSeek V3."""
    check_value(stated, "topk_method", "noaux_tc")
    return routing_rule(
        stated,
        "sigmoid",
        renormalise=stated["norm_topk_prob"],
        groups=stated["n_group"] or 1,
        kept_groups=stated["topk_group"] or 1,
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


def _mixers(latent: LatentArgs, args: DecoderArgs, build: BuildContext) -> Mixers:
    groups = latent_groups(latent, args.num_hidden_layers)
    return Mixers(groups, lambda layer: LatentAttention(latent, layer, groups, build))


def _has_experts(stated: Mapping[str, Any], layer: int) -> bool:
    kinds = stated.get("mlp_layer_types")
    return kinds[layer] == "sparse" if kinds else layer >= stated["first_k_dense_replace"]


def _sharpening(rope: Mapping[str, Any]) -> float:
    """What stretched rotation adds to the scale of scores: twice, for queries and for keys."""
    all_dim = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2)
