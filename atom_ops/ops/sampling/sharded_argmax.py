"""The argmax of logits whose vocabulary is split over ranks, without gathering them.

Each rank reduces its shard of a row to one key; the keys of all ranks are gathered and merged. A key is
an int64 that sorts like (logit, -id):

    63        32 31         0
    ┌───────────┬────────────┐
    │ the logit │ ~id        │   the float's bits, as an integer that sorts like it
    └───────────┴────────────┘

R rows, V ids of a shard, S shards.
"""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.sampling.sampling import top1
from atom_ops.tolerances import EXACT

_ID_BITS = 0xFFFFFFFF


def _shard_case(rows: int, vocabulary: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, int]:
        # Few different logits: the largest of a row is there several times.
        logits = torch.randint(-3, 3, (rows, vocabulary), generator=generator)
        return logits.to(dtype), 1000

    return Case(f"{rows}x{vocabulary}", make)


def _merge_case(shards: int, rows: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randint(-(2**62), 2**62, (shards, rows), generator=generator),)

    return Case(f"{shards}x{rows}", make)


@op([_shard_case(1, 50), _shard_case(9, 4133), _shard_case(3, 20000)], EXACT)
def shard_argmax(logits_RV: Tensor, first_id: int) -> Tensor:
    """Keys of the largest logit of each row, with ties to the smallest id: int64 [R].

    Column v is the logit of id `first_id` + v. A row with NaN logits gets a key of some id of the shard.
    """
    top_R, index_R = top1(logits_RV.float())
    bits_R = (top_R + 0.0).view(torch.int32).long()  # both zeros have the bits of +0
    sorted_R = torch.where(bits_R < 0, bits_R ^ 0x7FFFFFFF, bits_R)
    return (sorted_R << 32) | (_ID_BITS - (index_R + first_id))


@op([_merge_case(2, 1), _merge_case(3, 70), _merge_case(8, 5)], EXACT)
def merge_argmax(keys_SR: Tensor) -> Tensor:
    """The id of each row's largest key, int64 [R]."""
    return _ID_BITS - (keys_SR.amax(0) & _ID_BITS)
