"""Online quantization: a plain checkpoint becomes quantized weights while it is loaded.

Each matrix is rounded as soon as it is read, so that besides the quantized weights only one plain matrix
is in memory. Embeddings, the LM head, routers and norms have no scheme and stay plain.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial

import torch

from atom.shared.config.online_quantization import OnlineQuantization
from atom_ops import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, GroupINT4
from workers.layers.quantization import rounding
from workers.layers.quantization.rules import Rule, Rules, as_written, check_regex
from workers.layers.quantization.scheme import PLAIN, WHOLE, Scheme, StoredTensor

KEPT_PLAIN = ("kv_b_proj", "indexer", "linear_attn")
"""Modules that no format applies to: MLA's absorbed projection is used dequantized, the indexer of sparse
attention only selects tokens, and the projections of linear attention are reordered."""
ALWAYS_PLAIN = ("lm_head",)
"""Modules without a scheme that some models lack: they may be excluded everywhere."""
_BLOCK = 128


def online_rules(settings: OnlineQuantization) -> Rules:
    """Exclusions, then layer_quant_config in its order, then global_quant_config."""
    plain = [Rule(pattern, PLAIN, as_written) for pattern in (*KEPT_PLAIN, *settings.exclude_layer)]
    layers = _of_layers(settings)
    for rule in (*plain, *layers):
        if rule.pattern.startswith("re:"):
            check_regex(rule.pattern.removeprefix("re:"))
    default = PLAIN if settings.global_quant_config is None else scheme_of(settings.global_quant_config)
    return Rules(default, (*plain, *layers))


def _of_layers(settings: OnlineQuantization) -> list[Rule]:
    return [Rule(pattern, scheme_of(name), as_written) for pattern, name in settings.layer_quant_config]


def check_patterns(
    settings: OnlineQuantization, rules: Rules, asked: Mapping[str, str], modules: Iterable[str]
) -> None:
    """Raise ValueError for a pattern that names no layer, or only layers that others decide.

    `asked`: path of each matrix -> that of the layer that it is fused into. `modules`: paths of all modules.
    """
    decided = Counter(rules.deciding(matrix, layer) for matrix, layer in asked.items())
    for rule in _of_layers(settings):
        if rule in decided:
            continue
        first = next((rules.deciding(*paths) for paths in asked.items() if any(map(rule.names, paths))), None)
        where = f"--online-quant-config: layer_quant_config {rule.pattern!r:.80} "
        if first is None:
            raise ValueError(f"{where}names no layer that can be quantized{_example(asked)}")
        if first.pattern in KEPT_PLAIN:
            raise ValueError(f"{where}names layers that are always plain ({first.pattern}): omit it")
        raise ValueError(f"{where}does nothing: {first.pattern!r:.80} goes before it and names its layers")
    paths = {*asked, *asked.values(), *modules, *ALWAYS_PLAIN}
    for pattern in settings.exclude_layer:
        if not any(as_written(pattern, path) for path in paths):
            raise ValueError(
                f"--online-quant-config: exclude_layer {pattern!r:.80} names no layer{_example(asked)}"
            )
    if all(rule is not None and rule.scheme is PLAIN for rule in decided):
        raise ValueError("--online-quant-config: all layers are excluded, so it does nothing: omit it")


def _example(asked: Iterable[str]) -> str:
    name = next(iter(asked), None)
    return "" if name is None else f"; layers have names as {name}"


@cache
def scheme_of(name: str) -> Scheme:
    """The scheme of a format of `atom.shared.config.online_quantization`."""
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
