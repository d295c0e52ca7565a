"""Online quantization: a plain checkpoint becomes quantized weights while it is loaded.

Each matrix is rounded as soon as it is read, so that beside the quantized weights only one plain matrix is
in memory. Embeddings, the LM head, routers and norms have no scheme and stay plain.
"""

from functools import cache, partial

import torch

from atom.config.online_quantization import OnlineQuantization
from atom_ops import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, GroupINT4
from workers.layers.quantization import rounding
from workers.layers.quantization.rules import Rule, Rules, as_written, check_regex
from workers.layers.quantization.scheme import PLAIN, WHOLE, Scheme, StoredTensor

KEPT_PLAIN = ("kv_b_proj", "indexer", "linear_attn")
"""Modules that no format applies to: MLA's absorbed projection is used dequantized, the indexer of sparse
attention only selects tokens, and the projections of linear attention are reordered."""
_BLOCK = 128


def online_rules(settings: OnlineQuantization) -> Rules:
    """Exclusions, then layer_quant_config in its order, then global_quant_config."""
    plain = [Rule(pattern, PLAIN, as_written) for pattern in (*KEPT_PLAIN, *settings.exclude_layer)]
    layers = [Rule(pattern, scheme_of(name), as_written) for pattern, name in settings.layer_quant_config]
    for rule in (*plain, *layers):
        if rule.pattern.startswith("re:"):
            check_regex(rule.pattern.removeprefix("re:"))
    default = PLAIN if settings.global_quant_config is None else scheme_of(settings.global_quant_config)
    return Rules(default, (*plain, *layers))


@cache
def scheme_of(name: str) -> Scheme:
    """The scheme of a format of `atom.config.online_quantization`."""
    if name.startswith("int4_g"):
        return _int4(int(name.removeprefix("int4_g")))
    return {
        "ptpc_fp8": _CHANNEL_FP8,
        "per_block_fp8": _BLOCK_FP8,
        "per_block128_fp8": _BLOCK_FP8,
        "ptpc_int8": _CHANNEL_INT8,
        "mxfp4": _MXFP4,
    }[name]


def _stored(suffix: str, unit: tuple[int, int], dtype: torch.dtype | None) -> StoredTensor:
    """One of the tensors in memory; the checkpoint does not have it."""
    return StoredTensor(suffix, unit, (), PLAIN.tensors[0].fill, dtype)


_CHANNEL_FP8 = Scheme(
    "FP8 per channel",
    (1, 1),
    (
        _stored("_codes", (1, 1), torch.float8_e4m3fn),
        _stored("_scales", (1, WHOLE), torch.float32),
    ),
    lambda codes, scales: ChannelFP8(codes, scales.squeeze(-1)),
    quantize=rounding.to_channel_fp8,
)
_BLOCK_FP8 = Scheme(
    f"FP8 in blocks of {_BLOCK} x {_BLOCK}",
    (_BLOCK, _BLOCK),
    (
        _stored("_codes", (1, 1), torch.float8_e4m3fn),
        _stored("_scales", (_BLOCK, _BLOCK), torch.float32),
    ),
    lambda codes, scales: BlockFP8(codes, scales, (_BLOCK, _BLOCK)),
    quantize=partial(rounding.to_block_fp8, _BLOCK, _BLOCK),
)
_CHANNEL_INT8 = Scheme(
    "INT8 per channel",
    (1, 1),
    (
        _stored("_codes", (1, 1), torch.int8),
        _stored("_scales", (1, WHOLE), torch.float32),
    ),
    lambda codes, scales: ChannelINT8(codes, scales.squeeze(-1)),
    quantize=rounding.to_channel_int8,
)
_MXFP4 = Scheme(
    "MXFP4",
    (1, 32),
    (
        _stored("_codes", (1, 2), torch.uint8),
        _stored("_scales", (1, 32), torch.uint8),
    ),
    MXFP4,
    ragged=False,
    quantize=rounding.to_mxfp4,
)


def _int4(group: int) -> Scheme:
    return Scheme(
        f"INT4 in groups of {group} inputs",
        (1, group),
        (
            _stored("_codes", (1, 2), torch.uint8),
            _stored("_scales", (1, group), None),
            _stored("_zeros", (1, group), torch.uint8),
        ),
        GroupINT4,
        ragged=False,
        quantize=partial(rounding.to_group_int4, group),
    )
