"""Compressed rows of attention: a cache row that stands for M consecutive tokens of a sequence.

    states    a row for each token: values | gates        F + F features
    entries   a row for every M tokens: the sum of the window's values, weighted by softmax(gates + bias)
              for each feature alone, then normalised, with RoPE at the window's first position

    F = W     an entry is the sum over its own M tokens
    F = 2W    windows overlap: over the first W features of the M tokens before, and the last W of its own

The states that an entry is made of are needed no longer than its windows: they are cached like keys with a
sliding window of M or 2 M tokens, and the entries like those of full attention, in the slots of `row_slots`.

T tokens, W features of an entry, F of a value, M tokens of a window, B tokens of a block.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention_plan import AttentionPlan, plan_attention
from atom_ops.ops.attention.kv_cache import store, zeros
from atom_ops.ops.attention.rotary import rotary, rotation
from atom_ops.ops.elementwise.norm import rms_norm
from atom_ops.ops.latent.sparse_attention import TopKIndices, in_chunks, token_positions
from atom_ops.tolerances import DEFAULT, EXACT, REDUCTION

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CachedRows:
    """One layer's rows of one kind, with the block table of the step."""

    rows: Tensor
    """[num_blocks, rows of a block, W]."""
    plan: AttentionPlan
    block_size: int
    """Tokens of a block, B."""
    rate: int = 1
    """Tokens of a row, M: divides B or is a multiple of it."""
    window: int = 0
    """Tokens that a token reads the rows of, itself included; 0: all up to itself."""


def rows_of_block(block_size: int, rate: int) -> int:
    """Rows of a block, each for `rate` tokens. Raises ValueError where a block would cut a row."""
    if block_size % rate and rate % block_size:
        raise ValueError(
            f"--block-size {block_size} does not fit rows of {rate} tokens: one must be a "
            "multiple of the other"
        )
    return max(block_size // rate, 1)


def make_rows(
    num_blocks: int, block_size: int, width: int, rate: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An empty cache, [num_blocks, rows of a block, width]."""
    return zeros((num_blocks, rows_of_block(block_size, rate), width), dtype, device)


def row_slots(cache: CachedRows, row_T: Tensor, position_T: Tensor) -> Tensor:
    """The slot of the cached row that ends at a position, for rows of the step; int64, in their shape.

    It is in the block of its last token, which is the only one there where a row spans several blocks.
    """
    table_RW = cache.plan.block_table_RW
    if not table_RW.shape[1]:  # a step of padding alone, as where all rows are at their limits
        return torch.zeros_like(row_T + position_T)
    block_T = table_RW[row_T, position_T // cache.block_size].long()
    return block_T * cache.rows.shape[1] + position_T % cache.block_size // cache.rate


def tail_rotary(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """RoPE of pairs of neighbouring features on the last R features of every head."""
    rest = x_THE.shape[-1] - cos_T1R.shape[-1]
    rotated = rotary.reference(x_THE[..., rest:], cos_T1R, sin_T1R, True)
    return torch.cat((x_THE[..., :rest], rotated), -1)


def _angles(tokens: int, rope: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, 1, rope // 2, generator=generator) * 6.3
    return rotation(angles.cos(), angles.sin(), True)


def _write_case(tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(tokens, width + 32, generator=generator).to(dtype)[:, 16:-16]
        rows = make_rows(-(-tokens // 4) + 1, 4, width, 1, dtype, _CPU)
        return x, rows, torch.randperm(tokens + 4, generator=generator)[:tokens]

    return Case(f"{tokens}x{width}", make)


@op([_write_case(1, 2048), _write_case(13, 40)], EXACT)
def write_rows(x_TF: Tensor, rows: Tensor, slots_T: Tensor) -> None:
    """Store each token's row in its slot (int64); nothing for a negative slot (padding).

    Only the last dimension of `x_TF` must be contiguous.
    """
    store(rows.flatten(0, 1), slots_T, x_TF.to(rows.dtype))


def _normed_case(tokens: int, width: int, rope: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | float, ...]:
        x = (3 * torch.randn(tokens, width + 32, generator=generator)).to(dtype)[:, 16:-16]
        weight = torch.rand(width, generator=generator).to(dtype)
        rows = make_rows(-(-tokens // 4) + 1, 4, width, 1, dtype, _CPU)
        slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
        return x, weight, 1e-6, *_angles(tokens, rope, generator), rows, slots

    return Case(f"{tokens}x{width}r{rope}", make)


@op([_normed_case(1, 512, 64), _normed_case(13, 40, 8), _normed_case(5, 24, 24)], DEFAULT)
def write_normed_rows(
    x_TW: Tensor,
    weight_W: Tensor,
    eps: float,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    rows: Tensor,
    slots_T: Tensor,
) -> None:
    """Normalise each token's row, apply RoPE to its last R features, and store it in its slot (int64).

    Only the last dimension of `x_TW` must be contiguous. Cosines and sines are those of pairs of
    neighbouring features, see `rotation`. Nothing is stored for a negative slot (padding).
    """
    normed_T1W = rms_norm.reference(x_TW, weight_W, eps).unsqueeze(1)
    store(rows.flatten(0, 1), slots_T, tail_rotary(normed_T1W, cos_T1R, sin_T1R).squeeze(1).to(rows.dtype))


def _query_case(tokens: int, heads: int, width: int, rope: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | float, ...]:
        q = (3 * torch.randn(tokens, heads, width, generator=generator)).to(dtype)
        return q, 1e-6, *_angles(tokens, rope, generator)

    return Case(f"{tokens}x{heads}x{width}r{rope}", make)


@op([_query_case(1, 64, 512, 64), _query_case(13, 3, 40, 8), _query_case(2, 1, 24, 24)], DEFAULT)
def normed_queries(q_THE: Tensor, eps: float, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Each head divided by its root mean square, then RoPE as `write_normed_rows` applies it; [T, H, E]."""
    wide_THE = q_THE.float()
    normed_THE = wide_THE * torch.rsqrt(wide_THE.square().mean(-1, keepdim=True) + eps)
    return tail_rotary(normed_THE.to(q_THE.dtype), cos_T1R, sin_T1R)


def case_plan(
    query_lens: list[int], context_lens: list[int], block_size: int, generator: torch.Generator
) -> tuple[AttentionPlan, int]:
    """A plan with randomly placed blocks, and the number of blocks."""
    lens = np.array([query_lens, context_lens], np.int32)
    per_row = -(-max(context_lens) // block_size)
    blocks = torch.randperm(len(context_lens) * per_row + 3, generator=generator)
    table = blocks[: len(context_lens) * per_row].view(-1, per_row).int().numpy()
    return plan_attention(lens[0], lens[1], table, _CPU), len(blocks)


def _compress_case(
    query_lens: list[int], context_lens: list[int], rate: int, widths: tuple[int, int], overlaps: bool = False
) -> Case:
    """`widths` are W and R."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[CachedRows, Tensor, Tensor, float, Tensor, CachedRows]:
        width, rope = widths
        block_size = 16
        features = (1 + overlaps) * width
        plan, blocks = case_plan(query_lens, context_lens, block_size, generator)
        other, others = case_plan(query_lens, context_lens, block_size, generator)
        states = torch.randn(blocks, block_size, 2 * features, generator=generator).to(dtype)
        bias = torch.randn(rate, features, generator=generator)
        weight = torch.rand(width, generator=generator).to(dtype)
        angles = torch.rand(max(context_lens), rope // 2, generator=generator) * 6.3
        return (
            CachedRows(states, plan, block_size, window=rate * (1 + overlaps)), bias, weight, 1e-6,
            torch.cat((angles.cos(), angles.sin()), 1),
            CachedRows(make_rows(others, block_size, width, rate, dtype, _CPU), other, block_size, rate),
        )  # fmt: skip

    label = f"{widths}-{query_lens}of{context_lens}-rate{rate}{'-overlaps' if overlaps else ''}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _compress_case([1, 1, 1], [4, 17, 300], 4, (512, 64), overlaps=True),
        _compress_case([37, 1, 5], [90, 64, 5], 4, (40, 8), overlaps=True),
        _compress_case([1, 130], [128, 300], 128, (512, 64)),
        _compress_case([64, 1], [70, 16], 16, (24, 24)),
    ],
    DEFAULT,
)
def compress_rows(
    states: CachedRows,
    bias_MF: Tensor,
    weight_W: Tensor,
    eps: float,
    cos_sin_PR: Tensor,
    entries: CachedRows,
) -> None:
    """Store the entries whose last token is a new one of the step; `states` has these tokens' rows.

    `bias_MF` is float32, the table's rows are a position's cosines, then its sines. The first window of a
    sequence has none before it.
    """
    rate, features = bias_MF.shape
    row_T, position_T = token_positions(entries.plan, entries.plan.num_tokens)
    ends_E = ((position_T + 1) % rate == 0).logical_and_(position_T >= 0).nonzero().squeeze(1)
    back = features // len(weight_W) * rate
    for part in in_chunks(len(ends_E), back * features):
        row_E, last_E = row_T[ends_E[part]], position_T[ends_E[part]]
        at_EJ = last_E[:, None] - torch.arange(back - 1, -1, -1, device=last_E.device)
        slot_EJ = row_slots(states, row_E[:, None], at_EJ.clamp(min=0))
        state_EJX = states.rows.flatten(0, 1)[slot_EJ].float()
        value_EJF, gate_EJF = state_EJX.split([features, features], -1)
        gate_EJF = gate_EJF + bias_MF.repeat(back // rate, 1)
        gate_EJF = gate_EJF.masked_fill((at_EJ < 0)[..., None], -torch.inf)
        if back > rate:
            value_EJF, gate_EJF = (_own_halves(x, rate) for x in (value_EJF, gate_EJF))
        entry_EW = (value_EJF * gate_EJF.softmax(1)).sum(1).to(states.rows.dtype)
        cos_E1r, sin_E1r = cos_sin_PR[last_E - rate + 1].unsqueeze(1).chunk(2, -1)
        normed_E1W = rms_norm.reference(entry_EW, weight_W, eps).unsqueeze(1)
        rotated_E1W = tail_rotary(normed_E1W, *rotation(cos_E1r, sin_E1r, True))
        new_EW = rotated_E1W.squeeze(1).to(entries.rows.dtype)
        entries.rows.flatten(0, 1)[row_slots(entries, row_E, last_E)] = new_EW


def _own_halves(x_EJF: Tensor, rate: int) -> Tensor:
    """The first half of the first window's features, and the second half of the second one's."""
    width = x_EJF.shape[2] // 2
    return torch.cat((x_EJF[:, :rate, :width], x_EJF[:, rate:, width:]), 1)


def _attention_case(
    query_lens: list[int],
    context_lens: list[int],
    sizes: tuple[int, int, int],
    rate: int,
    window: int,
    topk: int = 0,
) -> Case:
    """`sizes` are H, E and R; `rate` 0: no entries, `topk` 0: all of them."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, CachedRows, CachedRows | None, TopKIndices | None, Tensor, Tensor, Tensor]:
        heads, width, rope = sizes
        tokens = sum(query_lens)
        plan, blocks = case_plan(query_lens, context_lens, 16, generator)
        recent = torch.randn(blocks, 16, width, generator=generator).to(dtype)
        entries, indices = None, None
        if rate:
            other, others = case_plan(query_lens, context_lens, 16, generator)
            rows = make_rows(others, 16, width, rate, dtype, _CPU)
            entries = CachedRows(rows.normal_(generator=generator), other, 16, rate)
        if entries is not None and topk:
            indices = _some_entries(entries, topk, generator)
        q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
        sinks = torch.randn(heads, generator=generator)
        cos_sin = _angles(tokens, rope, generator)
        return q, CachedRows(recent, plan, 16, window=window), entries, indices, sinks, *cos_sin

    label = f"{sizes}-{query_lens}of{context_lens}-rate{rate}-window{window}-top{topk}"
    return Case(label.replace(" ", ""), make)


def _some_entries(entries: CachedRows, topk: int, generator: torch.Generator) -> TopKIndices:
    """Random ones that each token sees, in their order."""
    row_T, position_T = token_positions(entries.plan, entries.plan.num_tokens)
    counts_T = ((position_T + 1) // entries.rate).clamp_(max=topk).int()
    slots = torch.full((len(row_T), topk), -1, dtype=torch.int32)
    for token, count in enumerate(counts_T.tolist()):
        seen = (int(position_T[token]) + 1) // entries.rate
        chosen = torch.randperm(seen, generator=generator)[:count].sort().values
        ends = (chosen + 1) * entries.rate - 1
        slots[token, :count] = row_slots(entries, row_T[token].expand(count), ends).int()
    return TopKIndices(slots, counts_T)


@op(
    [
        _attention_case([1, 1, 1], [1, 17, 300], (16, 512, 64), 4, 128, 64),
        _attention_case([37, 1, 5], [90, 64, 5], (3, 40, 8), 4, 22, 16),
        _attention_case([1, 130], [128, 300], (5, 64, 16), 32, 48),
        _attention_case([9, 1], [70, 20], (20, 24, 24), 4, 16),
        _attention_case([20, 1], [33, 40], (2, 32, 8), 0, 20),
        # One token: its rows are divided between programs.
        _attention_case([1], [300], (5, 40, 8), 4, 22, 64),
        _attention_case([1], [300], (17, 64, 16), 32, 48),
        _attention_case([1], [100], (2, 32, 8), 0, 70),
    ],
    REDUCTION,
)
def compressed_attention(
    q_THE: Tensor,
    recent: CachedRows,
    entries: CachedRows | None,
    topk: TopKIndices | None,
    sinks_H: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
) -> Tensor:
    """Attention of each token to the rows of its last tokens and to entries of its context, [T, H, E].

    A row is key and value of all heads. A token sees the rows of `recent.window` tokens, itself included,
    and the entries of `topk`, or all that end at or before it. The weights are softmax(q kᵀ / sqrt(E)) with
    the head's sink (float32) as one more logit. The last R features of the sum are rotated back:
    RoPE with the negated angles of the token's queries, whose cosines and sines are the arguments.
    """
    tokens, heads, width = q_THE.shape
    row_T, position_T = token_positions(recent.plan, tokens)
    out_THE = torch.empty_like(q_THE)
    most = entries.plan.max_context_len // entries.rate if entries is not None else 0
    most = most if topk is None else topk.slots_TJ.shape[1]
    for part in in_chunks(tokens, (recent.window + most) * max(heads, width)):
        at_TS = position_T[part, None] - torch.arange(recent.window - 1, -1, -1, device=q_THE.device)
        slot_TS = row_slots(recent, row_T[part, None], at_TS.clamp(min=0))
        key_TSE = recent.rows.flatten(0, 1)[slot_TS]
        seen_TS = at_TS >= 0
        if entries is not None and most:
            slot_TJ, seen_TJ = _entry_slots(entries, topk, row_T[part], position_T[part], part)
            key_TSE = torch.cat((key_TSE, entries.rows.flatten(0, 1)[slot_TJ]), 1)
            seen_TS = torch.cat((seen_TS, seen_TJ), 1)
        key_TSE = key_TSE.to(q_THE.dtype).masked_fill(~seen_TS[..., None], 0)
        score_THS = torch.bmm(q_THE[part], key_TSE.mT).float() * width**-0.5
        score_THS = score_THS.masked_fill_(~seen_TS[:, None], -torch.inf)
        sink_TH1 = sinks_H.float()[None, :, None].expand(len(score_THS), -1, 1)
        weight_THS = torch.cat((score_THS, sink_TH1), -1).softmax(-1)[..., :-1]
        out_THE[part] = torch.bmm(weight_THS.to(q_THE.dtype), key_TSE)
    return tail_rotary(out_THE, cos_T1R, -sin_T1R)


def _entry_slots(
    entries: CachedRows, topk: TopKIndices | None, row_T: Tensor, position_T: Tensor, part: slice
) -> tuple[Tensor, Tensor]:
    """Slots [T, J] of the entries that tokens read, and which of them exist."""
    if topk is not None:
        slot_TJ = topk.slots_TJ[part].long()
        return slot_TJ.clamp(min=0), slot_TJ >= 0
    most = entries.plan.max_context_len // entries.rate
    number_J = torch.arange(most, device=row_T.device)
    seen_TJ = number_J < ((position_T + 1) // entries.rate)[:, None]
    last_J = (number_J + 1) * entries.rate - 1
    return row_slots(entries, row_T[:, None], last_J[None, :]), seen_TJ
