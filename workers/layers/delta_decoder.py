"""The token mixers of the Qwen3-Next families: gated delta networks, and gated attention in some layers."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.cache_groups import StateGroup
from workers.layers.attention.gated_attention import GatedAttention
from workers.layers.attention.self_attention import kv_group
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import TokenMixer, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.gated_delta_net import DeltaArgs, GatedDeltaNet, state_shape

DELTA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LINEAR = "linear_attention"
_FULL = "full_attention"


def delta_decoder_args(config: Mapping[str, Any], build: BuildContext) -> DecoderArgs:
    """The decoder's arguments from a config with `DELTA_DEFAULTS`."""
    bias = config["attention_bias"]
    fields = common_fields(config, partial_rotary=True)
    return DecoderArgs(
        **fields, qkv_bias=bias, o_bias=bias, zero_centred_norms=True, mtp_layers=int(build.mtp)
    )


def delta_token_mixers(
    config: Mapping[str, Any], args: DecoderArgs, build: BuildContext, by_kind: bool = False
) -> TokenMixers:
    """Those of a config with `DELTA_DEFAULTS`; `by_kind` as in `DeltaArgs`.

    Raises ValueError for unknown kinds of layers and where no layer has full attention.
    """
    kinds = _layer_types(config)
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    full += range(len(kinds), args.cached_layers)
    linear = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    delta = _delta_args(config, by_kind)
    attention_group = kv_group(args, full, build)

    def make(layer: int, at: BuildContext) -> TokenMixer:
        if layer in full:
            return GatedAttention(args, layer, [attention_group], at.at(GatedAttention.name_on_disk))
        return GatedDeltaNet(delta, layer, 1, at.at(GatedDeltaNet.name_on_disk))

    return TokenMixers(
        [attention_group, StateGroup(linear, state_shape(delta, build))] if linear else [attention_group],
        make,
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer. Raises ValueError for unknown kinds and where no layer has full attention."""
    layers = config["num_hidden_layers"]
    every = config["full_attention_interval"]
    kinds = config.get("layer_types") or [
        _LINEAR if (layer + 1) % every else _FULL for layer in range(layers)
    ]
    if len(kinds) != layers or not {_FULL} <= {*kinds} <= {_FULL, _LINEAR}:
        raise ValueError(
            f"{config['model_type']} with layer_types {kinds} is not supported: they must be {_LINEAR} or "
            f"{_FULL} (at least once) for each of {layers} layers"
        )
    return list(kinds)


def _delta_args(config: Mapping[str, Any], by_kind: bool) -> DeltaArgs:
    return DeltaArgs(
        hidden_size=config["hidden_size"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_features=config["linear_key_head_dim"],
        value_features=config["linear_value_head_dim"],
        conv_kernel_size=config["linear_conv_kernel_dim"],
        eps=config["rms_norm_eps"],
        by_kind=by_kind,
    )
