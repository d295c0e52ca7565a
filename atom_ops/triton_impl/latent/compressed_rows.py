"""Compressed rows in Triton: the writes of rows and entries, and attention to both.

    _write_rows        a program for a block of a token's features
    _norm_and_rotate   a program for a head: norm, RoPE of the last features, to a slot or to the same place
    _compress          a program for a token; only those that end an entry do anything
    _attend            a program for a token, 16 heads and a share of its rows: first those of its window,
                       then its entries. Few tokens have several shares, which `_merge` adds up
    _merge             a program for a token and a head

With batch invariance every token has one share.

E features of a row and H heads as in the ops; blocks of features are powers of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.latent.compressed_rows import (
    CachedRows,
    compress_rows,
    compressed_attention,
    normed_queries,
    write_normed_rows,
    write_rows,
)
from atom_ops.ops.latent.sparse_attention import TopKIndices
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.latent.sparse_attention import row_and_seen

_BLOCK = 1024
_MOST_FEATURES = 512
_HEADS = 16
_MOST_SHARES = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
_PLAN_ALIGNMENT = ["table", "contexts", "starts", "entry_table", "entry_contexts", "entry_starts"]


# Slots are a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_rows(x, rows, slots, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, blocks of features)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < SIZE
    part = tl.load(x + token * x_stride + feature, mask=inside, other=0.0)
    tl.store(rows + slot * SIZE + feature, part.to(rows.dtype.element_ty), mask=inside & (slot >= 0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _norm_and_rotate(
    x, weight, cos, sin, out, slots, eps, x_stride, head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, H). `weight` None: 1; `slots` None: token t is in slot t."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rest: tl.constexpr = SIZE - ROPE
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    rotates = inside & (feature >= rest)
    other = tl.where(rotates, ((feature - rest) ^ 1) + rest, feature)
    x += token * x_stride + head * head_stride
    own = tl.load(x + feature, mask=inside, other=0.0)
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    exchanged = tl.load(x + other, mask=inside, other=0.0).to(tl.float32) * scale
    wide = wide * scale
    if weight is not None:
        wide = wide * tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
        exchanged = exchanged * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
    wide = wide.to(own.dtype).to(tl.float32)
    exchanged = exchanged.to(own.dtype).to(tl.float32)
    cos_E = tl.load(cos + token * cos_stride + feature - rest, mask=rotates, other=1.0)
    sin_E = tl.load(sin + token * sin_stride + feature - rest, mask=rotates, other=0.0)
    slot = token
    if slots is not None:
        slot = tl.load(slots + token)
    row = out + (slot * HEADS + head) * SIZE + feature
    tl.store(row, (wide * cos_E + exchanged * sin_E).to(out.dtype.element_ty), mask=inside & (slot >= 0))


@triton.jit
def _slot(table, position, inside, BLOCK_SIZE: tl.constexpr, RATE: tl.constexpr, ROWS: tl.constexpr):
    """The slots of rows that end at these positions."""
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * ROWS + position % BLOCK_SIZE // RATE


@triton.jit(
    do_not_specialize=["rows", "table_stride", "entry_stride"], do_not_specialize_on_alignment=_PLAN_ALIGNMENT
)
def _compress(
    states, table, bias, weight, angles, entries, entry_table, contexts, starts,
    eps, rows, table_stride, entry_stride,
    SIZE: tl.constexpr, WINDOWS: tl.constexpr, RATE: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,). ENTRIES: entries of a block; the new entry is rotated in pairs."""
    pdl_begin(PDL)
    row, seen = row_and_seen(tl.program_id(0), contexts, starts, rows)
    if (seen == 0) | (seen % RATE != 0):
        return
    features: tl.constexpr = WINDOWS * SIZE
    back: tl.constexpr = WINDOWS * RATE
    table += row.to(tl.int64) * table_stride
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_E = tl.zeros((BLOCK,), tl.float32)
    for number in range(tl.maximum(back - seen, 0), back):
        slot = _slot(table, seen - back + number, True, BLOCK_SIZE, 1, BLOCK_SIZE)
        of_window = (number // RATE if WINDOWS > 1 else 0) * SIZE + feature
        state = states + slot * (2 * features) + of_window
        value = tl.load(state, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(state + features, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(bias + (number % RATE) * features + of_window, mask=inside, other=0.0)
        higher = tl.maximum(most, gate)
        old = tl.exp(most - higher)
        new = tl.exp(gate - higher)
        total = total * old + new
        sum_E = sum_E * old + new * value
        most = higher
    entry = (sum_E / total).to(states.dtype.element_ty).to(tl.float32)
    entry = tl.where(inside, entry, 0.0)
    entry = entry * tl.rsqrt(tl.sum(entry * entry, 0) / SIZE + eps)
    entry *= tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    entry = entry.to(states.dtype.element_ty).to(tl.float32)
    first, second = tl.split(tl.reshape(entry, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2) - (SIZE - ROPE) // 2
    rotates = (pair >= 0) & (pair < ROPE // 2)
    angles += (seen - RATE).to(tl.int64) * ROPE
    cos = tl.load(angles + pair, mask=rotates, other=1.0)
    sin = tl.load(angles + ROPE // 2 + pair, mask=rotates, other=0.0)
    rotated = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (BLOCK,))
    slot = _slot(entry_table + row.to(tl.int64) * entry_stride, seen - 1, True, BLOCK_SIZE, RATE, ENTRIES)
    tl.store(entries + slot * SIZE + feature, rotated.to(entries.dtype.element_ty), mask=inside)


@triton.jit
def _attend_rows(q_HE, rows, slot_N, inside_N, state, scale, SIZE: tl.constexpr, BLOCK_E: tl.constexpr):
    """`state` (most, total, sum) after these rows; `scale` includes log2(e)."""
    most_H, total_H, sum_HE = state
    feature_E = tl.arange(0, BLOCK_E)
    inside_NE = inside_N[:, None] & (feature_E < SIZE)[None, :]
    row_NE = tl.load(rows + slot_N[:, None] * SIZE + feature_E[None, :], mask=inside_NE, other=0.0)
    row_NE = row_NE.to(q_HE.dtype)
    score_HN = tl.dot(q_HE, tl.trans(row_NE), input_precision="ieee") * scale
    score_HN = tl.where(inside_N[None, :], score_HN, float("-inf"))
    higher_H = tl.maximum(most_H, tl.max(score_HN, 1))
    weight_HN = tl.exp2(score_HN - higher_H[:, None])
    old_H = tl.exp2(most_H - higher_H)
    sum_HE = tl.dot(weight_HN.to(q_HE.dtype), row_NE, sum_HE * old_H[:, None], input_precision="ieee")
    return higher_H, total_H * old_H + tl.sum(weight_HN, 1), sum_HE


@triton.jit
def _rotated_back(
    sum_HE, cos, sin, SIZE: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The sums of values, [H, E], rotated by the negated angles of a token."""
    first_HP, second_HP = tl.split(tl.reshape(sum_HE, (BLOCK_H, BLOCK_E // 2, 2)))
    pair_P = tl.arange(0, BLOCK_E // 2) - (SIZE - ROPE) // 2
    rotates_P = (pair_P >= 0) & (pair_P < ROPE // 2)
    cos_P = tl.load(cos + 2 * pair_P, mask=rotates_P, other=1.0)[None, :]
    # The sine of a pair's second feature is the positive one.
    sin_P = tl.load(sin + 2 * pair_P + 1, mask=rotates_P, other=0.0)[None, :]
    rotated = tl.join(first_HP * cos_P + second_HP * sin_P, second_HP * cos_P - first_HP * sin_P)
    return tl.reshape(rotated, (BLOCK_H, BLOCK_E))


@triton.jit(
    do_not_specialize=["rows", "table_stride", "entry_stride", "most_entries", "shares"],
    do_not_specialize_on_alignment=_PLAN_ALIGNMENT,
)
def _attend(
    q, recent, table, contexts, starts, entries, entry_table, counts, sinks, cos, sin, out, sums, states,
    scale, rows, table_stride, entry_stride, most_entries, cos_stride, sin_stride, shares,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, RATE: tl.constexpr, ENTRIES: tl.constexpr, SELECTED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of heads, shares). RATE 0: no entries. SELECTED: `entry_table` has each token's slots.

    `sums` [T, H, shares, E] and `states` [T, H, shares, 2] are None with one share.
    """
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, seen = row_and_seen(tl.program_id(0), contexts, starts, rows)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    feature_E = tl.arange(0, BLOCK_E)
    inside_HE = (head_H < HEADS)[:, None] & (feature_E < SIZE)[None, :]
    at_HE = (token * HEADS + head_H)[:, None] * SIZE + feature_E[None, :]
    q_HE = tl.load(q + at_HE, mask=inside_HE, other=0.0)
    # The first share has the sink.
    most_H = tl.load(sinks + head_H, mask=head_H < HEADS, other=0.0).to(tl.float32) * _LOG2_E
    most_H = tl.where(tl.program_id(2) == 0, most_H, float("-inf"))
    total_H = tl.where(tl.program_id(2) == 0, tl.full((BLOCK_H,), 1.0, tl.float32), 0.0)
    sum_HE = tl.zeros((BLOCK_H, BLOCK_E), tl.float32)
    count = 0
    if SELECTED:
        entry_table += token * entry_stride
        count = tl.load(counts + token)
    elif RATE > 0:
        entry_table += row.to(tl.int64) * entry_stride
        count = tl.minimum(seen // RATE, most_entries)
    table += row.to(tl.int64) * table_stride
    window_start = tl.maximum(seen - WINDOW, 0)
    of_window = tl.cdiv(seen - window_start, BLOCK_N)
    share = tl.cdiv(of_window + tl.cdiv(count, BLOCK_N), shares)
    first = tl.program_id(2) * share
    last = first + share
    window_end = tl.minimum(seen, window_start + last * BLOCK_N)
    for start in range(window_start + first * BLOCK_N, window_end, BLOCK_N):
        position_N = start + tl.arange(0, BLOCK_N)
        inside_N = position_N < seen
        slot_N = _slot(table, position_N, inside_N, BLOCK_SIZE, 1, BLOCK_SIZE)
        most_H, total_H, sum_HE = _attend_rows(
            q_HE, recent, slot_N, inside_N, (most_H, total_H, sum_HE), scale, SIZE, BLOCK_E
        )  # fmt: skip
    if RATE > 0:
        entry_end = tl.minimum(count, (last - of_window) * BLOCK_N)
        for start in range(tl.maximum(first - of_window, 0) * BLOCK_N, entry_end, BLOCK_N):
            number_N = start + tl.arange(0, BLOCK_N)
            inside_N = number_N < count
            if SELECTED:
                slot_N = tl.load(entry_table + number_N, mask=inside_N, other=0).to(tl.int64)
            else:
                slot_N = _slot(entry_table, number_N * RATE + RATE - 1, inside_N, BLOCK_SIZE, RATE, ENTRIES)
            most_H, total_H, sum_HE = _attend_rows(
                q_HE, entries, slot_N, inside_N, (most_H, total_H, sum_HE), scale, SIZE, BLOCK_E
            )  # fmt: skip
    if sums is None:
        sum_HE = (sum_HE / total_H[:, None]).to(q_HE.dtype).to(tl.float32)
        sum_HE = _rotated_back(
            sum_HE, cos + token * cos_stride, sin + token * sin_stride, SIZE, ROPE, BLOCK_H, BLOCK_E
        )  # fmt: skip
        tl.store(out + at_HE, sum_HE.to(out.dtype.element_ty), mask=inside_HE)
    else:
        part_H = (token * HEADS + head_H) * shares + tl.program_id(2)
        tl.store(sums + part_H[:, None] * SIZE + feature_E[None, :], sum_HE, mask=inside_HE)
        tl.store(states + part_H * 2, most_H, mask=head_H < HEADS)
        tl.store(states + part_H * 2 + 1, total_H, mask=head_H < HEADS)


@triton.jit(do_not_specialize=["shares"])
def _merge(
    sums, states, cos, sin, out, cos_stride, sin_stride, shares,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, H)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = token * HEADS + tl.program_id(1)
    share_S = tl.arange(0, BLOCK_S)
    inside_S = share_S < shares
    feature_E = tl.arange(0, BLOCK_E)
    part_S = head * shares + share_S
    most_S = tl.load(states + part_S * 2, mask=inside_S, other=float("-inf"))
    weight_S = tl.exp2(most_S - tl.max(most_S, 0))
    total = tl.sum(tl.load(states + part_S * 2 + 1, mask=inside_S, other=0.0) * weight_S, 0)
    inside_SE = inside_S[:, None] & (feature_E < SIZE)[None, :]
    sum_SE = tl.load(sums + part_S[:, None] * SIZE + feature_E[None, :], mask=inside_SE, other=0.0)
    sum_E = (tl.sum(sum_SE * weight_S[:, None], 0) / total).to(out.dtype.element_ty).to(tl.float32)
    sum_1E = _rotated_back(
        tl.reshape(sum_E, (1, BLOCK_E)), cos + token * cos_stride, sin + token * sin_stride,
        SIZE, ROPE, 1, BLOCK_E,
    )  # fmt: skip
    sum_E = tl.reshape(sum_1E, (BLOCK_E,))
    tl.store(out + head * SIZE + feature_E, sum_E.to(out.dtype.element_ty), mask=feature_E < SIZE)


@write_rows.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TF, rows, slots_T: x_TF.stride(1) == slots_T.stride(0) == 1 and rows.is_contiguous(),
)
def _launch_write(x_TF: Tensor, rows: Tensor, slots_T: Tensor) -> None:
    tokens, size = x_TF.shape
    block = min(triton.next_power_of_2(size), _BLOCK)
    if tokens:
        _write_rows[(tokens, triton.cdiv(size, block))](
            x_TF, rows, slots_T, x_TF.stride(0),
            SIZE=size, BLOCK=block, num_warps=4, **launch_options(x_TF.device),
        )  # fmt: skip


def _supports_rotation(width: int, cos_T1R: Tensor, sin_T1R: Tensor) -> bool:
    return (width - cos_T1R.shape[2]) % 2 == 0 and cos_T1R.stride(2) == sin_T1R.stride(2) == 1


def _launch_norm(
    x_THE: Tensor, weight_E: Tensor | None, eps: float, cos_T1R: Tensor, sin_T1R: Tensor, out: Tensor,
    slots_T: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, size = x_THE.shape
    if tokens:
        _norm_and_rotate[(tokens, heads)](
            x_THE, weight_E, cos_T1R, sin_T1R, out, slots_T, eps,
            *x_THE.stride()[:2], cos_T1R.stride(0), sin_T1R.stride(0),
            HEADS=heads, SIZE=size, ROPE=cos_T1R.shape[2], BLOCK=triton.next_power_of_2(size), num_warps=1,
            **launch_options(x_THE.device),
        )  # fmt: skip


def _supports_normed_rows(
    x_TW: Tensor, weight_W: Tensor, eps: float, cos_T1R: Tensor, sin_T1R: Tensor, rows: Tensor,
    slots_T: Tensor,
) -> bool:  # fmt: skip
    contiguous = x_TW.stride(1) == slots_T.stride(0) == 1 and rows.is_contiguous()
    return contiguous and _supports_rotation(x_TW.shape[1], cos_T1R, sin_T1R)


@write_normed_rows.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports_normed_rows)
def _write_normed_rows(
    x_TW: Tensor, weight_W: Tensor, eps: float, cos_T1R: Tensor, sin_T1R: Tensor, rows: Tensor,
    slots_T: Tensor,
) -> None:  # fmt: skip
    _launch_norm(x_TW.unsqueeze(1), weight_W, eps, cos_T1R, sin_T1R, rows, slots_T)


@normed_queries.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THE, eps, cos_T1R, sin_T1R: (
        q_THE.stride(2) == 1 and _supports_rotation(q_THE.shape[2], cos_T1R, sin_T1R)
    ),
)
def _normed_queries(q_THE: Tensor, eps: float, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    _launch_norm(q_THE, None, eps, cos_T1R, sin_T1R, out_THE, None)
    return out_THE


def _supports_compress(
    states: CachedRows, bias_MF: Tensor, weight_W: Tensor, eps: float, cos_sin_PR: Tensor, entries: CachedRows
) -> bool:
    width = len(weight_W)
    return width <= _BLOCK and (width - cos_sin_PR.shape[1]) % 2 == 0


@compress_rows.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports_compress)
def _launch_compress(
    states: CachedRows, bias_MF: Tensor, weight_W: Tensor, eps: float, cos_sin_PR: Tensor, entries: CachedRows
) -> None:
    rate, features = bias_MF.shape
    size = len(weight_W)
    plan = entries.plan
    if plan.num_tokens:
        _compress[(plan.num_tokens,)](
            states.rows, states.plan.block_table_RW, bias_MF, weight_W, cos_sin_PR,
            entries.rows, plan.block_table_RW, plan.context_lens_R, plan.query_starts_R1,
            eps, len(plan.context_lens_R), states.plan.block_table_RW.stride(0),
            plan.block_table_RW.stride(0),
            SIZE=size, WINDOWS=features // size, RATE=rate, ROPE=cos_sin_PR.shape[1],
            BLOCK_SIZE=entries.block_size, ENTRIES=entries.rows.shape[1], BLOCK=triton.next_power_of_2(size),
            num_warps=4, **launch_options(bias_MF.device),
        )  # fmt: skip


def _supports_attention(
    q_THE: Tensor, recent: CachedRows, entries: CachedRows | None, topk: TopKIndices | None, sinks_H: Tensor,
    cos_T1R: Tensor, sin_T1R: Tensor,
) -> bool:  # fmt: skip
    if INTERPRETED and q_THE.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 tl.dot is wrong
    width = q_THE.shape[2]
    fits = width <= _MOST_FEATURES and q_THE.is_contiguous()
    return fits and _supports_rotation(width, cos_T1R, sin_T1R)


@compressed_attention.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports_attention)
def _launch_attention(
    q_THE: Tensor, recent: CachedRows, entries: CachedRows | None, topk: TopKIndices | None, sinks_H: Tensor,
    cos_T1R: Tensor, sin_T1R: Tensor,
) -> Tensor:  # fmt: skip
    tokens, heads, size = q_THE.shape
    out_THE = torch.empty_like(q_THE)
    plan = recent.plan
    of_entries = entries or recent  # without entries the kernel follows no pointer of these
    entry_table, counts = of_entries.plan.block_table_RW, plan.context_lens_R
    if topk is not None:
        entry_table, counts = topk.slots_TJ, topk.counts_T
    rate = 0 if entries is None else entries.rate
    most_entries = of_entries.plan.max_context_len // max(rate, 1)
    block_e = max(triton.next_power_of_2(size), 16)
    # Rows of a tile in shared memory: 64 KiB on AMD.
    block_n = 32 if q_THE.element_size() == 2 else 16
    programs = tokens * triton.cdiv(heads, _HEADS)
    if not programs:
        return out_THE
    shares = 1
    if not plan.split_tokens:
        most = 0 if entries is None else most_entries if topk is None else topk.slots_TJ.shape[1]
        most = triton.cdiv(min(recent.window, plan.max_context_len), block_n) + triton.cdiv(most, block_n)
        shares = max(1, min(num_sms(q_THE.device) // programs, most, _MOST_SHARES))
    sums = states = None
    if shares > 1:
        sums = q_THE.new_empty(tokens, heads, shares, size, dtype=torch.float32)
        states = q_THE.new_empty(tokens, heads, shares, 2, dtype=torch.float32)
    cos_sin_strides = cos_T1R.stride(0), sin_T1R.stride(0)
    sizes = {"HEADS": heads, "SIZE": size, "ROPE": cos_T1R.shape[2], "BLOCK_E": block_e}
    _attend[(tokens, triton.cdiv(heads, _HEADS), shares)](
        q_THE, recent.rows, plan.block_table_RW, plan.context_lens_R, plan.query_starts_R1,
        of_entries.rows, entry_table, counts, sinks_H, cos_T1R, sin_T1R, out_THE, sums, states,
        size**-0.5 * _LOG2_E.value, len(plan.context_lens_R), plan.block_table_RW.stride(0),
        entry_table.stride(0), most_entries, *cos_sin_strides, shares,
        WINDOW=recent.window, BLOCK_SIZE=recent.block_size, RATE=rate, ENTRIES=of_entries.rows.shape[1],
        SELECTED=topk is not None, BLOCK_H=_HEADS, BLOCK_N=block_n,
        num_warps=4, num_stages=1 if torch.version.hip else 2, **sizes, **launch_options(q_THE.device),
    )  # fmt: skip
    if shares > 1:
        _merge[(tokens, heads)](
            sums, states, cos_T1R, sin_T1R, out_THE, *cos_sin_strides, shares,
            BLOCK_S=_MOST_SHARES, num_warps=4, **sizes, **launch_options(q_THE.device),
        )  # fmt: skip
    return out_THE
