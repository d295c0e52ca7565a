"""INT4 weights and activations of 16 bits (W4A16), in the layouts of four libraries, all as `GroupINT4`.

O outputs, I inputs, G groups of inputs, which share a scale and a zero point:

                       codes                      scales          zero points
    compressed-tensors weight_packed [O, I / 8]   weight_scale    weight_zero_point [O / 8, G]
    GPTQ               qweight [I / 8, O]         scales [G, O]   qzeros [G, O / 8], g_idx [I]
    AWQ                qweight [I, O / 8]         scales [G, O]   qzeros [G, O / 8]
    Quark              weight [I, O / 8]          weight_scale    weight_zero_point [G, O / 8]

Codes and zero points are words of 32 bits: see `words`. A weight is (code - zero point) * scale. GPTQ with
desc_act (activation order) has the group of every input in g_idx.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from atom_ops import GroupINT4, Weight
from workers.layers.quantization.act_order import ordered
from workers.layers.quantization.fills import fill_bytes
from workers.layers.quantization.scheme import FLOATS, Packing, Scheme, StoredTensor
from workers.layers.quantization.words import (
    EVEN_FIRST,
    STRAIGHT,
    one_more,
    pairs_of_numbers,
    pairs_of_words,
    rows_of_words,
    unsigned,
)

GROUPS = (32, 64, 128)
"""Inputs of a group; None in place of one of them: all inputs."""
_WORD = 8
_INTS = (torch.int32,)
_CODES_STD = 4.6
"""Standard deviation of random codes."""

Unpack = Callable[[Tensor], Tensor]


@cache
def compressed_tensors(group: int | None, has_zeros: bool) -> Scheme:
    """pack-quantized: codes packed along inputs, zero points along outputs."""
    zeros = Packing("weight_zero_point", (_WORD, group or 0), False, rows_of_words) if has_zeros else None
    return _scheme(
        group,
        Packing("weight_packed", (1, _WORD), False, pairs_of_words),
        Packing("weight_scale", (1, group or 0), False, _as_it_is),
        zeros,
        unused=("weight_shape",),
    )


@cache
def gptq(group: int | None, stored_less_one: bool, act_order: bool) -> Scheme:
    """`stored_less_one`: checkpoint_format gptq stores zero points less one, gptq_v2 as they are."""
    zeros = _zeros_less_one if stored_less_one else rows_of_words
    return _scheme(
        group,
        Packing("qweight", (1, _WORD), True, pairs_of_words),
        Packing("scales", (1, group or 0), True, _as_it_is),
        Packing("qzeros", (_WORD, group or 0), True, zeros),
        act_order=act_order and group is not None,
        unused=("g_idx",),
    )


@cache
def awq(group: int | None, has_zeros: bool) -> Scheme:
    """Version gemm: all packed along outputs, even outputs first."""
    zeros = Packing("qzeros", (_WORD, group or 0), True, partial(rows_of_words, nibbles=EVEN_FIRST))
    return _scheme(
        group,
        Packing("qweight", (_WORD, 1), True, partial(_pairs_of_outputs, EVEN_FIRST, False)),
        Packing("scales", (1, group or 0), True, _as_it_is),
        zeros if has_zeros else None,
        unused=() if has_zeros else ("qzeros",),
    )


@cache
def quark(group: int | None, reordered: bool, signed: bool) -> Scheme:
    """`reordered`: pack_method reorder; `signed`: dtype int4, symmetric; else uint4 with zero points."""
    order = EVEN_FIRST if reordered else STRAIGHT
    zeros = Packing("weight_zero_point", (_WORD, group or 0), True, partial(rows_of_words, nibbles=order))
    return _scheme(
        group,
        Packing("weight", (_WORD, 1), True, partial(_pairs_of_outputs, order, signed)),
        Packing("weight_scale", (1, group or 0), group is not None, _as_it_is),
        None if signed else zeros,
        unused=("weight_zero_point",) if signed else (),
    )


def _scheme(
    group: int | None,
    codes: Packing,
    scales: Packing,
    zeros: Packing | None,
    act_order: bool = False,
    unused: tuple[str, ...] = (),
) -> Scheme:
    unit = (1, group or 0)
    tensors = [
        StoredTensor("_codes", (1, 2), _INTS, fill_bytes, torch.uint8, codes),
        StoredTensor("_scales", unit, FLOATS, _fill_scales, None, scales, act_order),
    ]
    if zeros is not None:
        tensors.append(StoredTensor("_zeros", unit, _INTS, _fill_zeros, torch.uint8, zeros, act_order))
    if act_order:
        assert group is not None
        groups = Packing("g_idx", (0, 1), False, _as_it_is, vector=True)
        fill = partial(_fill_groups, group)
        tensors.append(StoredTensor("_groups", (0, 1), _INTS, fill, torch.int32, groups))
        unused = tuple(name for name in unused if name != "g_idx")
    outputs = max(packing.unit[0] for packing in (codes, zeros) if packing is not None)
    inputs = _WORD if act_order or group is None else group
    name = f"INT4 with a scale for each {group} inputs" if group else "INT4 with a scale for each output"
    weight: Callable[..., Weight] = ordered if act_order else GroupINT4
    return Scheme(name, (outputs, inputs), tuple(tensors), weight, ragged=False, unused=unused)


def group_of(size: object) -> int | None:
    """The inputs of a group, None for -1: all inputs. Raises ValueError for a size that is not supported."""
    if size == -1:
        return None
    if size not in GROUPS or type(size) is not int:
        raise ValueError(f"group_size {size!r:.40}; supported: {', '.join(map(str, GROUPS))}, -1")
    return size


def _as_it_is(part: Tensor) -> Tensor:
    return part


def _zeros_less_one(words: Tensor) -> Tensor:
    return rows_of_words(one_more(words))


def _pairs_of_outputs(order: tuple[int, ...], signed: bool, words: Tensor) -> Tensor:
    """Codes that are packed along outputs, [O / 8, I], to pairs of inputs, [O, I / 2]."""
    pairs = pairs_of_numbers(rows_of_words(words, order))
    return unsigned(pairs) if signed else pairs


def _fill_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(std / _CODES_STD)


def _fill_zeros(zeros: Tensor, std: float, generator: torch.Generator) -> None:
    zeros.fill_(8)


def _fill_groups(group: int, groups: Tensor, std: float, generator: torch.Generator) -> None:
    groups.copy_(torch.arange(groups.shape[-1], device=groups.device) // group)
