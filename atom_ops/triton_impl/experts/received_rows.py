"""Sum of own rows, rows that another GPU has sent, and the residual; then the RMS norm: see `peer_copies`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.elementwise.all_reduce import programs_at_once
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin


@triton.jit(do_not_specialize=["rows"])
def _add_received_rows(
    x_ptr, received_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, rows, eps, flag_ptr, seen_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    # The other GPU's copy engine writes the flag after the rows; acquiring it orders the loads below.
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass
    # The last program to see the flag clears it for the next rows.
    if tl.atomic_add(seen_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(seen_ptr, 0)
        tl.store(flag_ptr, 0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * SIZE + column  # a slot has fewer than 2^31 elements
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        received = tl.load(received_ptr + at, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = (x.to(tl.float32) + received + residual).to(x.dtype)
        tl.store(total_ptr + at, total, mask=inside)
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        tl.store(out_ptr + at, wide * scale * weight, mask=inside)


def add_received_rows(
    x_TD: Tensor,
    received_TD: Tensor,
    arrival: tuple[Tensor, Tensor],
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total), where total is the sum of `x_TD`, `received_TD` and the residual.

    `arrival`: two int32 [1], a flag that is set once the rows are there, and a zero for the kernel's use;
    both are zero again afterwards. The bits are those of `all_reduce_rows` between two ranks.
    """
    rows, size = x_TD.shape
    x_TD = x_TD.contiguous()
    residual_TD = residual_TD.contiguous()
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    _add_received_rows[(min(rows, programs_at_once(x_TD.device, warps)),)](
        x_TD, received_TD, residual_TD, weight_D, out_TD, total_TD, rows, eps, *arrival,
        SIZE=size, BLOCK=block, num_warps=warps, **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TD, total_TD
