"""The cache slots of a step's contexts in one list: what kernels that know pages of one token read.

row 0, 3 tokens     row 1, 2 tokens      rest
s0  s1  s2          s3  s4               0 …        indices
0                   3               5               indptr
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention_plan import AttentionPlan, plan_attention
from atom_ops.tolerances import EXACT


@dataclass(frozen=True, slots=True)
class KVIndices:
    """Row r's slots are `indices_S[indptr_R1[r] : indptr_R1[r + 1]]`."""

    indptr_R1: Tensor
    """int32."""
    indices_S: Tensor
    """int32, R * max_context_len; 0 after the last row's."""


def _case(context_lens: list[int], block_size: int, longest: int = 0) -> Case:
    """`longest`: `max_context_len` of the plan, where it only bounds the contexts."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[AttentionPlan, int]:
        rows = len(context_lens)
        most = max(longest, *context_lens)
        width = -(-most // block_size)
        table = torch.randperm(rows * width, generator=generator).view(rows, width)
        lens = np.array([[1] * rows, context_lens], np.int32)
        plan = plan_attention(lens[0], lens[1], table.numpy().astype(np.int32), torch.device("cpu"))
        return replace(plan, max_context_len=most), block_size

    return Case(f"{context_lens}by{block_size}upto{longest}".replace(" ", ""), make)


@op([_case([5], 1), _case([3, 0, 70, 1], 16), _case([2, 1100], 4, 1200), _case([0, 0], 8, 9)], EXACT)
def kv_indices(plan: AttentionPlan, block_size: int) -> KVIndices:
    """The slots of all tokens of each row's context, row by row; does not synchronise.

    A row without context has slot 0: kernels that divide by a sum over tokens need at least one.
    """
    rows, width = plan.block_table_RW.shape
    lens_R = plan.context_lens_R.clamp(min=1).long()
    contexts_R = plan.context_lens_R
    ends_R = lens_R.cumsum(0)
    index_S = torch.arange(rows * plan.max_context_len, device=ends_R.device)
    row_S = torch.searchsorted(ends_R, index_S, right=True).clamp_(max=rows - 1)
    at_S = index_S - (ends_R - lens_R)[row_S]
    block_S = plan.block_table_RW[row_S, (at_S // block_size).clamp_(max=width - 1)].long()
    slot_S = (block_S * block_size + at_S % block_size) * (at_S < contexts_R[row_S])
    return KVIndices(functional.pad(ends_R, (1, 0)).int(), slot_S.int())
