"""Logits processors, and the records of tokens: a launch for each processor of a batch.

  _copy_rows        a program for a part of a row: float32 logits
  _exclude_rows     the same for rows with a list of allowed ids: minus infinity
  _keep_listed      ... then the listed logits again
  _add_listed       a program for a block of a list, as in the next two
  _exclude_early
  _exclude_words
  _penalize         a program for a part of a row; it reads the counts of all ids, so that an id which a
                    record holds twice is penalized once

A later launch sees what the earlier ones wrote. `out` is float32 [U, V].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.logits_processors import (
    ANY,
    BadWords,
    Bias,
    EndIds,
    LogitsProcessorBatch,
    Penalties,
    RecordedRows,
    TokenRecord,
    apply_logits_processors,
    record_sampled,
)
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_PART = 4096
_ENTRIES = 256
_ANY = tl.constexpr(ANY)


@triton.jit
def _copy_rows(logits, rows_U, out, vocabulary, stride, PART: tl.constexpr):
    u = tl.program_id(0).to(tl.int64)
    id = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = id < vocabulary
    value = tl.load(logits + tl.load(rows_U + u) * stride + id, mask=inside)
    tl.store(out + u * vocabulary + id, value.to(tl.float32), mask=inside)


@triton.jit
def _exclude_rows(rows, out, vocabulary, PART: tl.constexpr):
    u = tl.load(rows + tl.program_id(0))
    id = tl.program_id(1) * PART + tl.arange(0, PART)
    tl.store(out + u * vocabulary + id, -float("inf"), mask=id < vocabulary)


@triton.jit
def _keep_listed(logits, rows_U, places_E, out, entries, vocabulary, stride, ENTRIES: tl.constexpr):
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = e < entries
    place = tl.load(places_E + e, mask=inside, other=0)
    row = tl.load(rows_U + place // vocabulary, mask=inside, other=0)
    value = tl.load(logits + row * stride + place % vocabulary, mask=inside)
    tl.store(out + place, value.to(tl.float32), mask=inside)


@triton.jit
def _add_listed(places_E, values_E, out, entries, ENTRIES: tl.constexpr):
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = e < entries
    place = tl.load(places_E + e, mask=inside, other=0)
    # A list may hold an id twice.
    tl.atomic_add(out + place, tl.load(values_E + e, mask=inside, other=0.0), mask=inside, sem="relaxed")


@triton.jit
def _exclude_early(positions_R, rows_U, rows_E, until_E, places_E, out, entries, ENTRIES: tl.constexpr):
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = e < entries
    row = tl.load(rows_U + tl.load(rows_E + e, mask=inside, other=0), mask=inside, other=0)
    early = tl.load(positions_R + row, mask=inside, other=0) < tl.load(until_E + e, mask=inside, other=0)
    place = tl.load(places_E + e, mask=inside, other=0)
    tl.store(out + place, -float("inf"), mask=inside & early)


@triton.jit
def _exclude_words(
    positions_R, rows_U, rows_N, records_N, offsets_N, ids_ML, rows_B, before_BJ, begins_B, places_B, out,
    words, longest_word, record_stride, ENTRIES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = b < words
    n = tl.load(rows_B + b, mask=inside, other=0)
    row = tl.load(rows_U + tl.load(rows_N + n, mask=inside, other=0), mask=inside, other=0)
    end = tl.load(positions_R + row, mask=inside, other=0) - tl.load(offsets_N + n, mask=inside, other=0)
    begin = tl.load(begins_B + b, mask=inside, other=0)
    record = ids_ML + tl.load(records_N + n, mask=inside, other=0) * record_stride
    complete = inside
    for j in range(longest_word):
        before = tl.load(before_BJ + b * longest_word + j, mask=inside, other=_ANY)
        entry = end + j - longest_word
        generated = inside & (entry >= begin)
        same = generated & (tl.load(record + entry, mask=generated, other=_ANY) == before)
        complete = complete & (same | (before == _ANY))
    place = tl.load(places_B + b, mask=inside, other=0)
    tl.store(out + place, -float("inf"), mask=complete)


@triton.jit
def _penalize(
    rows_N, records_N, repetition_N, frequency_N, presence_N, seen_MV, out, vocabulary, PART: tl.constexpr
):
    n = tl.program_id(0)
    id = tl.program_id(1) * PART + tl.arange(0, PART)
    seen = tl.load(seen_MV + tl.load(records_N + n) * vocabulary + id, mask=id < vocabulary, other=0)
    place = out + tl.load(rows_N + n) * vocabulary + id
    logit = tl.load(place, mask=seen > 0, other=0.0)
    repetition = tl.load(repetition_N + n)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    times = seen >> 1
    logit = logit - tl.load(frequency_N + n) * times.to(tl.float32)
    logit = logit - tl.load(presence_N + n) * (times > 0).to(tl.float32)
    tl.store(place, logit, mask=seen > 0)


@triton.jit
def _record(
    ids_ML, seen_MV, rows_N, records_N, offsets_N, positions_U, ids_U, kept_U, rows, vocabulary, stride,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = n < rows
    u = tl.load(rows_N + n, mask=inside, other=0)
    if kept_U is not None:
        inside = inside & (tl.load(kept_U + u, mask=inside, other=0) != 0)
    record = tl.load(records_N + n, mask=inside, other=0)
    entry = tl.load(positions_U + u, mask=inside, other=0) - tl.load(offsets_N + n, mask=inside, other=0)
    id = tl.load(ids_U + u, mask=inside, other=0)
    tl.store(ids_ML + record * stride + entry, id.to(tl.int32), mask=inside)
    seen = seen_MV + record * vocabulary + id
    tl.store(seen, tl.load(seen, mask=inside, other=0) + 2, mask=inside)


@apply_logits_processors.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_RV, positions_R, processors, record, longest: (
        logits_RV.stride(1) == 1 and record.ids_ML.is_contiguous() and record.seen_MV.is_contiguous()
    ),
)
def _apply(
    logits_RV: Tensor,
    positions_R: Tensor,
    processors: LogitsProcessorBatch,
    record: TokenRecord,
    longest: int,
) -> Tensor:
    rows = len(processors.rows_U)
    vocabulary = logits_RV.shape[1]
    stride = logits_RV.stride(0)
    parts = triton.cdiv(vocabulary, _PART)
    out_UV = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits_RV.device)
    if not rows:
        return out_UV
    _copy_rows[rows, parts](logits_RV, processors.rows_U, out_UV, vocabulary, stride, PART=_PART)
    if processors.allowed is not None:
        listed = processors.allowed.places_E
        _exclude_rows[len(processors.allowed.rows), parts](
            processors.allowed.rows, out_UV, vocabulary, PART=_PART
        )
        _keep_listed[_blocks(listed)](
            logits_RV, processors.rows_U, listed, out_UV, len(listed), vocabulary, stride, ENTRIES=_ENTRIES
        )
    if processors.bias is not None:
        _add(processors.bias, out_UV)
    if processors.end_ids is not None:
        _exclude_ends(processors.end_ids, positions_R, processors.rows_U, out_UV)
    if processors.recorded is not None and processors.bad_words is not None:
        _exclude_last(
            processors.bad_words, processors.recorded, record, positions_R, processors.rows_U, out_UV
        )
    if processors.recorded is not None and processors.penalties is not None:
        _apply_penalties(processors.penalties, processors.recorded, record, out_UV)
    return out_UV


def _blocks(entries: Tensor) -> tuple[int]:
    return (triton.cdiv(len(entries), _ENTRIES),)


def _add(bias: Bias, out_UV: Tensor) -> None:
    _add_listed[_blocks(bias.places_E)](
        bias.places_E, bias.values_E, out_UV, len(bias.places_E), ENTRIES=_ENTRIES
    )


def _exclude_ends(ends: EndIds, positions_R: Tensor, rows_U: Tensor, out_UV: Tensor) -> None:
    _exclude_early[_blocks(ends.places_E)](
        positions_R, rows_U, ends.rows_E, ends.until_E, ends.places_E, out_UV, len(ends.places_E),
        ENTRIES=_ENTRIES,
    )  # fmt: skip


def _exclude_last(
    words: BadWords,
    rows: RecordedRows,
    record: TokenRecord,
    positions_R: Tensor,
    rows_U: Tensor,
    out_UV: Tensor,
) -> None:
    _exclude_words[_blocks(words.places_B)](
        positions_R, rows_U, rows.rows_N, rows.records_N, rows.offsets_N, record.ids_ML,
        words.rows_B, words.before_BJ, words.begins_B, words.places_B, out_UV,
        len(words.places_B), words.before_BJ.shape[1], record.ids_ML.shape[1], ENTRIES=_ENTRIES,
    )  # fmt: skip


def _apply_penalties(penalties: Penalties, rows: RecordedRows, record: TokenRecord, out_UV: Tensor) -> None:
    vocabulary = out_UV.shape[1]
    _penalize[len(rows.rows_N), triton.cdiv(vocabulary, _PART)](
        rows.rows_N, rows.records_N, penalties.repetition_N, penalties.frequency_N, penalties.presence_N,
        record.seen_MV, out_UV, vocabulary, PART=_PART, enable_fp_fusion=False,
    )  # fmt: skip


@record_sampled.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda record, rows, positions_U, ids_U, kept_U=None: (
        record.ids_ML.is_contiguous() and record.seen_MV.is_contiguous() and len(rows.rows_N) > 0
    ),
)
def _record_ids(
    record: TokenRecord, rows: RecordedRows, positions_U: Tensor, ids_U: Tensor, kept_U: Tensor | None = None
) -> None:
    _record[_blocks(rows.rows_N)](
        record.ids_ML, record.seen_MV, rows.rows_N, rows.records_N, rows.offsets_N, positions_U, ids_U,
        kept_U, len(rows.rows_N), record.seen_MV.shape[1], record.ids_ML.shape[1], ENTRIES=_ENTRIES,
    )  # fmt: skip
