"""Prefill attention of whole prompts: keys and values are in the order of the step's tokens.

One program computes one head of a tile of one row's tokens. A key is loaded in two chunks, because
its width need not be a power of two: 192 features are 128 and 64.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.latent.latent_attention import prompt_attention
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.shared_memory import buffers, fitting_block
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.hardware.tiles import row_of_tile

_LOG2_E = 1.4426950408889634
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _load_chunk(x, token_M, end, stride, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Features first … first + BLOCK - 1 of the tokens before `end`."""
    feature_E = tl.arange(0, BLOCK)
    wanted_ME = (token_M < end)[:, None] & (feature_E < WIDTH - first)[None, :]
    at_ME = token_M.to(tl.int64)[:, None] * stride + first + feature_E[None, :]
    return tl.load(x + at_ME, mask=wanted_ME, other=0.0)


@triton.jit
def _attend_block(
    top_M, total_M, sum_MV, q_ME, rest_ME, place_M, k, v, start, first_token, length, k_stride, v_stride,
    score_scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One iteration of the online softmax, over tokens start … start + BLOCK_N - 1 of the row."""
    place_N = start + tl.arange(0, BLOCK_N)
    token_N = first_token + place_N
    end = first_token + length
    k_NE = _load_chunk(k, token_N, end, k_stride, 0, WIDTH, BLOCK_E)
    score_MN = tl.dot(q_ME, tl.trans(k_NE), input_precision="ieee")
    if BLOCK_REST > 0:
        k_NR = _load_chunk(k, token_N, end, k_stride, BLOCK_E, WIDTH, BLOCK_REST)
        score_MN = tl.dot(rest_ME, tl.trans(k_NR), score_MN, input_precision="ieee")
    score_MN = score_MN * score_scale
    if MASKED:
        score_MN = tl.where(place_N[None, :] <= place_M[:, None], score_MN, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    rescale_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_M = total_M * rescale_M + tl.sum(weight_MN, 1)
    v_NV = _load_chunk(v, token_N, end, v_stride, 0, VALUE, BLOCK_V)
    sum_MV = tl.dot(weight_MN.to(v_NV.dtype), v_NV, sum_MV * rescale_M[:, None], input_precision="ieee")
    return new_top_M, total_M, sum_MV


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _prompts(
    q, k, v, out, starts, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    out_stride, score_scale, rows,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, tile numbers). The last tiles of a row take longest and are launched first."""
    pdl_begin(PDL)
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_of_tile(number, starts, 0, rows, TILE)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    tile_start = (number - first_token // TILE - row) * TILE
    if tile_start >= length:
        return

    q += head * q_head_stride
    k += head * k_head_stride
    v += head * v_head_stride
    place_M = tile_start + tl.arange(0, TILE)
    token_M = first_token + place_M
    end = first_token + length
    q_ME = _load_chunk(q, token_M, end, q_stride, 0, WIDTH, BLOCK_E)
    rest_ME = q_ME
    if BLOCK_REST > 0:
        rest_ME = _load_chunk(q, token_M, end, q_stride, BLOCK_E, WIDTH, BLOCK_REST)
    top_M = tl.full((TILE,), _LOWEST, tl.float32)
    total_M = tl.zeros((TILE,), tl.float32)
    sum_MV = tl.zeros((TILE, BLOCK_V), tl.float32)
    for start in range(0, tile_start, BLOCK_N):
        top_M, total_M, sum_MV = _attend_block(
            top_M, total_M, sum_MV, q_ME, rest_ME, place_M, k, v, start, first_token, length, k_stride,
            v_stride, score_scale, WIDTH, VALUE, BLOCK_N, BLOCK_E, BLOCK_REST, BLOCK_V, False,
        )  # fmt: skip
    for start in range(tile_start, tl.minimum(tile_start + TILE, length), BLOCK_N):
        top_M, total_M, sum_MV = _attend_block(
            top_M, total_M, sum_MV, q_ME, rest_ME, place_M, k, v, start, first_token, length, k_stride,
            v_stride, score_scale, WIDTH, VALUE, BLOCK_N, BLOCK_E, BLOCK_REST, BLOCK_V, True,
        )  # fmt: skip
    value_V = tl.arange(0, BLOCK_V)
    out_MV = out + token_M.to(tl.int64)[:, None] * out_stride + head * VALUE + value_V[None, :]
    wanted_MV = (place_M < length)[:, None] & (value_V < VALUE)[None, :]
    tl.store(out_MV, (sum_MV / total_M[:, None]).to(out.dtype.element_ty), mask=wanted_MV)


@dataclass(frozen=True, slots=True)
class _KernelConfig:
    """`tile` queries, a multiple of `tokens`, the keys of one iteration."""

    tile: int
    tokens: int
    warps: int
    stages: int


def _config(dtype: torch.dtype) -> _KernelConfig:
    if dtype == torch.float32 and not INTERPRETED:
        return _KernelConfig(32, 16, 4, 1)
    if torch.version.hip is not None:
        return _KernelConfig(128, 32, 4, 1)
    return _KernelConfig(128, 64, 8, 2)


def _fitting_tokens(config: _KernelConfig, widths: tuple[int, int], q_THE: Tensor) -> int:
    """`config.tokens`, or fewer that fit in shared memory; `widths`: of the blocks of keys and of values."""
    device, size = q_THE.device, q_THE.element_size()

    def tile_bytes(tokens: int) -> int:
        kept = buffers(config.stages, device) * tokens * sum(widths)
        return size * (kept + config.tile * (widths[0] + tokens))

    return fitting_block(config.tokens, tile_bytes, device)


def _chunks(width: int) -> tuple[int, int]:
    """The block sizes, powers of two, of a key's two chunks; the second is 0 if one is enough."""
    first = max(triton.next_power_of_2(width), 16)
    if first - width < first // 4:
        return first, 0
    return first // 2, max(triton.next_power_of_2(width - first // 2), 16)


def _supports(q_THE: Tensor, k_THE: Tensor, v_THV: Tensor, plan: AttentionPlan, scale: float) -> bool:
    if INTERPRETED and q_THE.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 tl.dot is wrong
    return (
        q_THE.shape[2] <= 256
        and v_THV.shape[2] <= 256
        and q_THE.stride(2) == k_THE.stride(2) == v_THV.stride(2) == 1
    )


@prompt_attention.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _prompt_attention(
    q_THE: Tensor, k_THE: Tensor, v_THV: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    tokens, heads, width = q_THE.shape
    value = v_THV.shape[2]
    out_THV = q_THE.new_empty(tokens, heads, value)
    blocks = _config(q_THE.dtype)
    rows = len(plan.context_lens_R)
    block, rest = _chunks(width)
    block_value = max(triton.next_power_of_2(value), 16)
    if tokens:
        _prompts[(heads, tokens // blocks.tile + rows)](
            q_THE, k_THE, v_THV, out_THV, plan.query_starts_R1,
            *q_THE.stride()[:2], *k_THE.stride()[:2], *v_THV.stride()[:2], out_THV.stride(0),
            scale * _LOG2_E, rows,
            WIDTH=width, VALUE=value, TILE=blocks.tile,
            BLOCK_N=_fitting_tokens(blocks, (block + rest, block_value), q_THE),
            BLOCK_E=block, BLOCK_REST=rest, BLOCK_V=block_value,
            num_warps=blocks.warps, num_stages=blocks.stages, **launch_options(q_THE.device),
        )  # fmt: skip
    return out_THV
