"""`select_slots` in Triton: one kernel that looks up and counts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.experts.expert_slots import ExpertSlots, select_slots
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 256


@triton.jit
def _select(
    topk_ids, slots, replicas, load, found, pairs, experts, most,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of pairs,)."""
    pdl_begin(PDL)
    pair_P = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id_P = tl.load(topk_ids + pair_P, mask=pair_P < pairs, other=-1)
    valid_P = (id_P >= 0) & (id_P < experts)
    count_P = tl.load(replicas + id_P, mask=valid_P, other=1)
    replica_P = (pair_P // TOP_K) % count_P
    slot_P = tl.load(slots + id_P * most + replica_P, mask=valid_P, other=-1)
    tl.atomic_add(load + id_P, 1, mask=valid_P, sem="relaxed")
    tl.store(found + pair_P, slot_P.to(tl.int64), mask=pair_P < pairs)


@select_slots.provider("triton", needs=NEEDS, supported=runs_on)
def _launch(topk_ids_TJ: Tensor, experts: ExpertSlots) -> Tensor:
    topk_ids_TJ = topk_ids_TJ.contiguous()
    found_TJ = torch.empty_like(topk_ids_TJ)
    if pairs := topk_ids_TJ.numel():
        _select[(triton.cdiv(pairs, _BLOCK),)](
            topk_ids_TJ, experts.slots_XR, experts.replicas_X, experts.load_X, found_TJ,
            pairs, *experts.slots_XR.shape, TOP_K=topk_ids_TJ.shape[1], BLOCK=_BLOCK, num_warps=4,
            **launch_options(topk_ids_TJ.device),
        )  # fmt: skip
    return found_TJ
