"""GPTQ's activation order: groups of inputs that are not neighbours.

The inputs are sorted by their group, so that the weight is an ordinary `GroupINT4` of the sorted inputs.
A rank that keeps some inputs of a matrix has parts of groups, of unequal sizes. They are filled up to a
multiple of 32 with inputs of weight zero: with groups of 128 over two ranks that is about a quarter more.
"""

import torch
from torch import Tensor

from atom_ops import GroupINT4, Reordered
from workers.layers.quantization.words import numbers_of_pairs, pairs_of_numbers

_PART = 32
"""Inputs that share a scale where groups are cut."""


def ordered(codes: Tensor, scales: Tensor, *rest: Tensor) -> Reordered:
    """The weight of codes [..., O, I / 2], scales [..., O, G], zeros [..., O, G] and groups [..., N, I].

    `groups` has the group of each input, a row for each of N fused matrices. Raises ValueError if these
    differ or if a group does not exist.
    """
    zeros, groups = rest
    inputs = groups.shape[-1]
    if groups.is_meta:  # a plan of the memory: how groups are cut is only known from the checkpoint
        return Reordered(GroupINT4(codes, scales, zeros), groups[..., 0, :].long(), inputs)
    if codes.dim() == 2:
        return _ordered(codes, scales, zeros, _common(groups, scales.shape[-1]))
    orders = [_common(each, scales.shape[-1]) for each in groups]
    parts = [_ordered(*tensors) for tensors in zip(codes, scales, zeros, orders, strict=True)]
    if len({part.order.shape for part in parts}) > 1:
        raise ValueError(
            "g_idx divides the inputs of each expert in another way between the tensor-parallel ranks, "
            "which is not supported: use --enable-expert-parallel, or --tensor-parallel-size 1"
        )
    weights = [part.weight for part in parts]
    stacked = [
        torch.stack([getattr(each, name) for each in weights]) for name in ("codes", "scales", "zeros")
    ]
    return Reordered(GroupINT4(*stacked), torch.stack([part.order for part in parts]), inputs)


def _common(groups: Tensor, count: int) -> Tensor:
    """The group of each input, which all rows [N, I] agree on."""
    if not bool((groups == groups[0]).all()):
        raise ValueError(
            "g_idx of fused modules (as q_proj, k_proj and v_proj) differs, which is not supported"
        )
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise ValueError(f"g_idx names groups {int(groups.min())} to {int(groups.max())}; there are {count}")
    return groups[0].long()


def _ordered(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Reordered:
    inputs = groups.shape[0]
    sizes = torch.bincount(groups, minlength=scales.shape[-1])
    largest = int(sizes.max())
    equal = bool(((sizes == 0) | (sizes == largest)).all())
    part = largest if equal and largest % _PART == 0 else _PART  # kernels read groups of 32 or more
    parts = -(-sizes // part)
    starts = (parts * part).cumsum(0) - parts * part
    firsts = sizes.cumsum(0) - sizes
    by_group = groups.argsort(stable=True)
    of = groups[by_group]
    places = starts[of] + torch.arange(inputs, device=groups.device) - firsts[of]
    total = int(parts.sum()) * part
    order = by_group.new_zeros(total).index_copy_(0, places, by_group)
    group_of_part = torch.arange(len(sizes), device=groups.device).repeat_interleave(parts)
    scales = scales[:, group_of_part]
    zeros = zeros[:, group_of_part]
    numbers = zeros.repeat_interleave(part, 1)  # a code that equals its zero point has weight zero
    numbers.index_copy_(1, places, numbers_of_pairs(codes)[:, by_group])
    return Reordered(GroupINT4(pairs_of_numbers(numbers), scales, zeros), order, inputs)
