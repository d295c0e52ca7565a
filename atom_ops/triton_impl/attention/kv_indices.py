"""The slots of all contexts: several programs for each row."""

import torch
import triton
import triton.language as tl

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_indices import KVIndices, kv_indices
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 1024
_PROGRAMS = 1024
"""Programs of a launch: too few for one to each block of the plan's bound, which contexts rarely reach."""


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "contexts", "indptr"]
)
def _list_slots(
    table, contexts, indptr, indices, table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows, programs of a row)."""
    row = tl.program_id(0)
    context = tl.load(contexts + row)
    indices += tl.load(indptr + row).to(tl.int64)
    table += row.to(tl.int64) * table_stride
    for start in range(tl.program_id(1) * BLOCK, context, tl.num_programs(1) * BLOCK):
        token = start + tl.arange(0, BLOCK)
        exists = token < context
        block = tl.load(table + token // BLOCK_SIZE, mask=exists, other=0)
        tl.store(indices + token, block * BLOCK_SIZE + token % BLOCK_SIZE, mask=exists)


@kv_indices.provider("triton", needs=NEEDS, supported=runs_on)
def _kv_indices(plan: AttentionPlan, block_size: int) -> KVIndices:
    contexts_R = plan.context_lens_R
    table_RW = plan.block_table_RW
    rows = len(contexts_R)
    longest = plan.max_context_len
    indptr_R1 = torch.zeros(rows + 1, dtype=torch.int32, device=contexts_R.device)
    torch.cumsum(contexts_R.clamp(min=1), 0, dtype=torch.int32, out=indptr_R1[1:])
    indices_S = torch.zeros(rows * longest, dtype=torch.int32, device=contexts_R.device)
    if rows:
        programs = max(1, min(_PROGRAMS // rows, triton.cdiv(longest, _BLOCK)))
        _list_slots[(rows, programs)](
            table_RW,
            contexts_R,
            indptr_R1,
            indices_S,
            table_RW.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
        )
    return KVIndices(indptr_R1, indices_S)
