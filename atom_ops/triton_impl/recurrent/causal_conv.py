"""Causal convolution: a step of single tokens in one launch, any other step in two.

decode     one program for some channels of a row: sum, then shift the row's state by one
otherwise  tiles of tokens across rows, which only read the state; then a second launch that
           writes the new state of each row
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.recurrent.causal_conv import causal_conv
from atom_ops.ops.recurrent.recurrent_state import StatePlan, starts_alike
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_STEP_CHANNELS = 256
_TILE_CHANNELS = 64
_TILE_TOKENS = 32


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


# Numbers and offsets of rows and tokens change with the batch; they must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots", "sources", "starts", "fresh"])
def _one_token_each(
    x, weight, states, slots, sources, fresh, starts, out, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of C). A row reads the state of its source, and writes its slot."""
    pdl_begin(PDL)
    row = tl.program_id(0)
    channel_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = channel_C < CHANNELS
    slot = tl.load(slots + row)
    token = tl.load(starts + row).to(tl.int64)
    known_C = inside_C & (slot >= 0) & (tl.load(fresh + row) == 0)
    kept_C = inside_C & (slot >= 0)
    read = states + tl.load(sources + row) * ((TAPS - 1) * CHANNELS) + channel_C
    states += slot * ((TAPS - 1) * CHANNELS) + channel_C
    newest_C = tl.load(x + token * x_stride + channel_C, mask=inside_C, other=0.0)
    taps_C = weight + channel_C * TAPS
    total_C = tl.zeros((BLOCK_C,), tl.float32)
    for tap in tl.static_range(TAPS - 1):
        seen_C = tl.load(read + tap * CHANNELS, mask=known_C, other=0.0)
        total_C += seen_C.to(tl.float32) * tl.load(taps_C + tap, mask=inside_C, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(states + (tap - 1) * CHANNELS, seen_C, mask=kept_C)
    # The same order of additions as in `_any_tokens`, for the same bits.
    total_C += newest_C.to(tl.float32) * tl.load(taps_C + TAPS - 1, mask=inside_C, other=0.0).to(tl.float32)
    tl.store(states + (TAPS - 2) * CHANNELS, newest_C, mask=kept_C)
    tl.store(out + token * CHANNELS + channel_C, _silu(total_C).to(out.dtype.element_ty), mask=inside_C)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _any_tokens(
    x, weight, states, slots, fresh, starts, out, tokens, rows, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of T, blocks of C). `SEARCH` steps of bisection find the row of any token."""
    pdl_begin(PDL)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_T, inside_C = token_T < tokens, channel_C < CHANNELS
    # A token's row is the number of rows that end at the token or before it.
    row_T = tl.zeros((BLOCK_T,), tl.int32)
    past_T = tl.zeros((BLOCK_T,), tl.int32) + rows
    for _ in tl.static_range(SEARCH):
        middle_T = (row_T + past_T) // 2
        open_T = row_T < past_T
        ended_T = tl.load(starts + 1 + middle_T, mask=open_T, other=0) <= token_T
        row_T = tl.where(open_T & ended_T, middle_T + 1, row_T)
        past_T = tl.where(open_T & (ended_T == 0), middle_T, past_T)
    row_T = tl.minimum(row_T, rows - 1)
    offset_T = token_T - tl.load(starts + row_T)
    slot_T = tl.load(slots + row_T)
    known_T = inside_T & (slot_T >= 0) & (tl.load(fresh + row_T) == 0)
    total_TC = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        new_T = offset_T >= back
        x_at_TC = (token_T - back).to(tl.int64)[:, None] * x_stride + channel_C[None, :]
        x_TC = tl.load(x + x_at_TC, mask=(inside_T & new_T)[:, None] & inside_C[None, :], other=0.0)
        seen_at_TC = (slot_T * (TAPS - 1) + offset_T + tap)[:, None] * CHANNELS + channel_C[None, :]
        old_TC = (known_T & (new_T == 0))[:, None] & inside_C[None, :]
        seen_TC = tl.load(states + seen_at_TC, mask=old_TC, other=0.0)
        tap_C = tl.load(weight + channel_C * TAPS + tap, mask=inside_C, other=0.0).to(tl.float32)
        total_TC += (x_TC.to(tl.float32) + seen_TC.to(tl.float32)) * tap_C[None, :]
    out_at_TC = token_T.to(tl.int64)[:, None] * CHANNELS + channel_C[None, :]
    inside_TC = inside_T[:, None] & inside_C[None, :]
    tl.store(out + out_at_TC, _silu(total_TC).to(out.dtype.element_ty), mask=inside_TC)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _store_inputs(
    x, states, slots, fresh, starts, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of C)."""
    pdl_begin(PDL)
    row = tl.program_id(0)
    channel_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = channel_C < CHANNELS
    slot, start = tl.load(slots + row), tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    states += slot * ((TAPS - 1) * CHANNELS) + channel_C
    is_live = (slot >= 0) & (length > 0)
    is_known = is_live & (tl.load(fresh + row) == 0)
    for place in tl.static_range(TAPS - 1):
        # In place: entry `place` is loaded from a higher index, which is not overwritten yet.
        position = length + place - (TAPS - 1)
        x_at_C = (start + position).to(tl.int64) * x_stride + channel_C
        new_C = tl.load(x + x_at_C, mask=inside_C & is_live & (position >= 0), other=0.0)
        old = is_known & (position < 0)
        old_C = tl.load(states + (length + place) * CHANNELS, mask=inside_C & old, other=0.0)
        tl.store(states + place * CHANNELS, tl.where(position >= 0, new_C, old_C), mask=inside_C & is_live)


def _supports(x_TC: Tensor, weight_CW: Tensor, conv_SWC: Tensor, plan: StatePlan) -> bool:
    in_order = weight_CW.is_contiguous() and conv_SWC.is_contiguous()
    in_order = in_order and x_TC.stride(1) == 1 and starts_alike(plan)
    return in_order and x_TC.dtype == conv_SWC.dtype and weight_CW.shape[1] > 1


@causal_conv.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(x_TC: Tensor, weight_CW: Tensor, conv_SWC: Tensor, plan: StatePlan) -> Tensor:
    tokens, channels = x_TC.shape
    taps = weight_CW.shape[1]
    rows = len(plan.slots_R)
    out_TC = x_TC.new_empty(tokens, channels)
    where = plan.slots_R, plan.fresh_R, plan.query_starts_R1
    settings = {"CHANNELS": channels, "TAPS": taps, "num_warps": 4, **launch_options(x_TC.device)}
    block = min(triton.next_power_of_2(channels), _STEP_CHANNELS)
    by_row = (rows, triton.cdiv(channels, block))
    if plan.max_query_len == 1:
        _one_token_each[by_row](
            x_TC, weight_CW, conv_SWC, plan.slots_R, plan.starts_from_R, plan.fresh_R, plan.query_starts_R1,
            out_TC, x_TC.stride(0), BLOCK_C=block, **settings,
        )  # fmt: skip
        return out_TC
    tile = min(triton.next_power_of_2(channels), _TILE_CHANNELS)
    _any_tokens[(triton.cdiv(tokens, _TILE_TOKENS), triton.cdiv(channels, tile))](
        x_TC, weight_CW, conv_SWC, *where, out_TC, tokens, rows, x_TC.stride(0),
        BLOCK_T=_TILE_TOKENS, BLOCK_C=tile, SEARCH=rows.bit_length(), **settings,
    )  # fmt: skip
    _store_inputs[by_row](x_TC, conv_SWC, *where, x_TC.stride(0), BLOCK_C=block, **settings)
    return out_TC
