"""The argmax of a sharded vocabulary: a program for each chunk of a row, joined by an atomic maximum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.sharded_argmax import merge_argmax, shard_argmax
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_CHUNK = 4096
_ROWS = 64
_LEAST_KEY = -(2**63)


@triton.jit
def _shard_argmax(logits_ptr, keys_ptr, first_id, vocabulary, stride, CHUNK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    id_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside_C = id_C < vocabulary
    logit_C = tl.load(logits_ptr + row * stride + id_C, mask=inside_C, other=-float("inf")).to(tl.float32)
    logit_C = tl.where(logit_C == logit_C, logit_C, -float("inf"))
    top = tl.max(logit_C, 0)
    id = first_id + tl.min(tl.where((logit_C == top) & inside_C, id_C, vocabulary - 1), 0)
    bits = tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True)
    sorted = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    tl.atomic_max(keys_ptr + row, (sorted << 32) | (0xFFFFFFFF - id.to(tl.int64)))


@triton.jit
def _merge_argmax(keys_ptr, ids_ptr, rows, SHARDS: tl.constexpr, ROWS: tl.constexpr):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < rows
    best_R = tl.load(keys_ptr + row_R, mask=inside_R, other=0)
    for shard in tl.static_range(1, SHARDS):
        best_R = tl.maximum(best_R, tl.load(keys_ptr + shard * rows + row_R, mask=inside_R, other=0))
    tl.store(ids_ptr + row_R, 0xFFFFFFFF - (best_R & 0xFFFFFFFF), mask=inside_R)


@shard_argmax.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_RV, first_id: logits_RV.stride(1) == 1 and len(logits_RV) > 0,
)
def _launch_shard(logits_RV: Tensor, first_id: int) -> Tensor:
    rows, vocabulary = logits_RV.shape
    keys_R = torch.full((rows,), _LEAST_KEY, dtype=torch.int64, device=logits_RV.device)
    _shard_argmax[triton.cdiv(vocabulary, _CHUNK), rows](
        logits_RV, keys_R, first_id, vocabulary, logits_RV.stride(0), CHUNK=_CHUNK
    )
    return keys_R


@merge_argmax.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda keys_SR: keys_SR.is_contiguous() and keys_SR.shape[1] > 0,
)
def _launch_merge(keys_SR: Tensor) -> Tensor:
    shards, rows = keys_SR.shape
    ids_R = torch.empty_like(keys_SR[0])
    _merge_argmax[(triton.cdiv(rows, _ROWS),)](keys_SR, ids_R, rows, SHARDS=shards, ROWS=_ROWS, num_warps=2)
    return ids_R
