"""The decoder of the DeepSeek families: MLA, and experts in all but the first layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from atom_ops import RoutingRule, TokenShard
from workers.layers.config_values import check_value
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.mla.mla import LATENT_MODULES, LatentArgs, LatentAttention, latent_groups
from workers.layers.mla.sharded_mla import ShardedLatentAttention
from workers.layers.mla.sparse_mla import IndexerArgs, sparse_token_mixers
from workers.layers.moe.expert_layouts import PER_EXPERT, ExpertLayout
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.mtp import PredictingDecoderLM

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V3_DEFAULTS = {
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
"""Defaults of DeepSeek V3 and of families with its routing."""
_INDEX_DEFAULTS = {"index_head_dim": 128, "index_topk": 2048}


class LatentDecoderLM(PredictingDecoderLM):
    """A family passes its routing rule and its configuration with defaults."""

    packed_modules_mapping = {**DecoderLM.packed_modules_mapping, **LATENT_MODULES}
    expert_layout: ClassVar[ExpertLayout] = PER_EXPERT

    def __init__(
        self,
        config: Mapping[str, Any],
        rule: RoutingRule,
        build: BuildContext,
        correction_bias: bool,
        indexer: IndexerArgs | None = None,
    ):
        """`config` is config.json with the family's defaults; `correction_bias` as in `MoEArgs`.

        With `indexer` attention is sparse.
        """
        config = {**_DEFAULTS, **config}
        _check_supported(config)
        args = replace(decoder_args(config), mtp_layers=int(build.mtp))
        latent = latent_args(config)
        token_mixers = (
            sparse_token_mixers(latent, indexer, build)
            if indexer
            else latent_token_mixers(latent, args.cached_layers, build)
        )
        moe = replace(moe_args(config, rule, correction_bias), layout=self.expert_layout)

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            return MoE(moe, at) if has_experts(config, layer) else GatedMLP(args, at)

        super().__init__(config, args, build, mlp, token_mixers)


class SparseLatentDecoderLM(LatentDecoderLM):
    """DeepSeek V3 with sparse attention."""

    def __init__(
        self, config: Mapping[str, Any], build: BuildContext, kinds: Sequence[str], interleaved: bool
    ):
        """`config` is config.json with the family's defaults.

        `kinds` has one entry per layer: "full" for a layer with an indexer, "shared" for one that
        uses the top-k indices of the layer before. `interleaved` is the indexer's RoPE style.
        """
        config = {**DEEPSEEK_V3_DEFAULTS, **_INDEX_DEFAULTS, **config}
        check_value(config, "rope_interleave", True)
        check_value(config, "indexer_rope_interleave", interleaved)
        layers = config["num_hidden_layers"]
        if len(kinds) != layers or not {"full", "shared"}.issuperset(kinds):
            raise ValueError(f"indexer_types must be full or shared for each of {layers} layers: {kinds}")
        indexer = IndexerArgs(
            heads=config["index_n_heads"],
            width=config["index_head_dim"],
            topk=config["index_topk"],
            interleaved=interleaved,
            has_indexer=[*(kind == "full" for kind in kinds), *[True] * int(build.mtp)],
        )
        super().__init__(config, noaux_tc_rule(config), build, correction_bias=True, indexer=indexer)


def decoder_args(config: Mapping[str, Any]) -> DecoderArgs:
    """The decoder's arguments; its head_dim is the rotary dimension of a head."""
    fields = common_fields({**config, "head_dim": config["qk_rope_head_dim"]})
    return DecoderArgs(**fields, rope_interleaved=config.get("rope_interleave", True))


def latent_args(config: Mapping[str, Any]) -> LatentArgs:
    """The attention's arguments. Raises KeyError for a missing field."""
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    return LatentArgs(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        nope_dim=nope,
        rope_dim=rope,
        v_dim=config["v_head_dim"],
        scale=(nope + rope) ** -0.5 * _yarn_mscale(config["rope_parameters"]) ** 2,
        bias=config["attention_bias"],
        interleaved=config.get("rope_interleave", True),
    )


def moe_args(config: Mapping[str, Any], rule: RoutingRule, correction_bias: bool) -> MoEArgs:
    """The arguments of layers with experts. Raises KeyError for a missing field."""
    features = config["moe_intermediate_size"]
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["n_routed_experts"],
        expert_features=features,
        rule=rule,
        hidden_act=config.get("hidden_act", "silu"),
        router_dtype=torch.float32,
        correction_bias=correction_bias,
        shared_features=(config["n_shared_experts"] or 0) * features,
    )


def routing_rule(config: Mapping[str, Any], scoring: str, **more: Any) -> RoutingRule:
    """The routing rule from the fields that these families share; `more` are further arguments."""
    check_value(config, "scoring_func", scoring)
    return RoutingRule(
        config["num_experts_per_tok"],
        scoring,  # type: ignore[arg-type]
        scale=config["routed_scaling_factor"],
        **more,
    )


def noaux_tc_rule(config: Mapping[str, Any]) -> RoutingRule:
    """DeepSeek V3's routing (noaux_tc): sigmoid scores with a correction bias, limited to the best groups."""
    check_value(config, "topk_method", "noaux_tc")
    return routing_rule(
        config,
        "sigmoid",
        renormalise=config["norm_topk_prob"],
        groups=config["n_group"] or 1,
        kept_groups=config["topk_group"] or 1,
    )


def _check_supported(config: Mapping[str, Any]) -> None:
    check_value(config, "mlp_bias", False)
    check_value(config, "moe_layer_freq", 1)


def latent_token_mixers(latent: LatentArgs, layers: int, build: BuildContext) -> TokenMixers:
    """MLA of so many layers, over all tokens."""
    groups = latent_groups(latent, layers, TokenShard(build.dcp.rank, build.dcp.size))
    kind = LatentAttention if build.dcp.size == 1 else ShardedLatentAttention
    return TokenMixers(groups, lambda layer, at: kind(latent, layer, groups, at.at("self_attn")))


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    kinds = config.get("mlp_layer_types") or ()  # layers for multi-token prediction are not listed
    return kinds[layer] == "sparse" if layer < len(kinds) else layer >= config["first_k_dense_replace"]


def _yarn_mscale(rope: Mapping[str, Any]) -> float:
    """YaRN's factor on queries and keys; squared, it scales the attention scores."""
    all_dim = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return 1.0
    return float(0.1 * all_dim * math.log(rope["factor"]) + 1.0)
