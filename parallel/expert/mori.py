"""MORI, AMD's all-to-all library, as a form of dispatch; imported on ROCm only, when it is chosen."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from atom.utils import optional_library
from parallel.expert.all_to_all import owners
from parallel.expert.dispatch import PlannedDispatch, RoutedTokens
from parallel.mesh import Mesh
from parallel.rendezvous import MeetingPoint

if TYPE_CHECKING:
    from mori.ops import EpDispatchCombineOp

_UNIQUE_ID = "mori_unique_id"
_DTYPES = (torch.bfloat16, torch.float32)
# What AMD's own engines launch: blocks, warps of a block, and RDMA blocks beside those.
_ONE_NODE = 80, 16, 0
_NODES = 32, 16, 16


def mori_problem(device: torch.device) -> str | None:
    """Why MORI cannot run on that device, or None."""
    if device.type != "cuda" or torch.version.hip is None:
        return "MORI needs an AMD GPU and torch for ROCm"
    if find_spec("mori") is None:
        return "the package amd-mori is not installed"
    return mori_failure(device)


def mori_failure(device: torch.device) -> str | None:
    """Why MORI, which is installed, cannot be used on that AMD GPU, and what to do; else None."""
    on_rocm = device.type == "cuda" and torch.version.hip is not None
    return optional_library.problem(optional_library.MORI) if on_rocm else None


class MoriDispatch(PlannedDispatch):
    """Dispatch and combine by `mori.ops.EpDispatchCombineOp`: a token once to each rank that needs it.

    The tokens arrive in symmetric memory of a fixed size, which the next dispatch overwrites; how many
    arrived is known on the device alone, so that graphs can capture it.
    """

    def __init__(self, mesh: Mesh, max_tokens: int):
        """`max_tokens`: the most of a data-parallel rank in a step. Memory is reserved by the first one."""
        super().__init__(mesh)
        self._mesh = mesh
        self._max_share = -(-max_tokens // mesh.tp.size)
        self._op: EpDispatchCombineOp | None = None

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """Raises ValueError unless every rank has the same number of experts."""
        if num_experts % self.ep.size:
            raise ValueError(
                f"MORI cannot spread {num_experts} experts evenly over {self.ep.size} ranks; "
                "use --all2all-backend allgather_reducescatter or alltoall"
            )
        return super().local_experts(num_experts)

    def dispatch(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor, num_experts: int) -> RoutedTokens:
        """Raises ValueError for another number of tokens than was planned."""
        tokens = x_TD.shape[0]
        most = sum(self._planned(tokens))  # a rank gets no token twice
        if self._op is None:
            self._op = self._open(x_TD, ids_TJ.shape[1], num_experts)
        share = self._share(tokens)
        nowhere = owners(ids_TJ, num_experts, self.ep.size) == self.ep.size
        # MORI knows no id of no expert: such a choice goes to an expert of this rank, with weight 0.
        first, _ = self.local_experts(num_experts)
        ids_SJ = ids_TJ.where(~nowhere, first)[share].int().contiguous()
        x_MD, weights_MJ, _, ids_MJ, arrived_1 = self._op.dispatch(
            input=x_TD[share].contiguous(),
            weights=weights_TJ.where(~nowhere, 0.0)[share].contiguous(),
            scales=None,
            indices=ids_SJ,
        )
        self._last = tokens, share, ids_SJ
        valid_M1 = torch.arange(most, device=x_TD.device).unsqueeze(1) < arrived_1
        ids_MJ = ids_MJ[:most].long().where(valid_M1, -1)
        return RoutedTokens(x_MD[:most], ids_MJ, weights_MJ[:most])

    def combine(self, out_MD: Tensor) -> Tensor:
        tokens, share, ids_SJ = self._last
        assert self._op is not None, "set by the dispatch before"
        # The experts have applied the weights.
        sums, _ = self._op.combine(input=out_MD.contiguous(), weights=None, indices=ids_SJ)
        return functional.pad(sums[: len(ids_SJ)], (0, 0, share.start, tokens - share.stop))

    def _open(self, x_TD: Tensor, chosen: int, num_experts: int) -> "EpDispatchCombineOp":
        """MORI's op for this model; every rank calls this in its first step."""
        if x_TD.dtype not in _DTYPES:
            raise ValueError(f"MORI sends no {x_TD.dtype}; use --dtype bfloat16")
        import mori.ops

        assert self._mesh.meeting is not None, "several ranks have met"
        _join(self._mesh.meeting, self.ep.rank, self.ep.size)
        gpus = torch.cuda.device_count()
        if self.ep.size <= gpus:
            kernels = mori.ops.EpDispatchCombineKernelType.IntraNode
            blocks, warps, rdma_blocks = _ONE_NODE
        else:
            kernels = mori.ops.EpDispatchCombineKernelType.InterNodeV1
            blocks, warps, rdma_blocks = _NODES
        config = mori.ops.EpDispatchCombineConfig(
            data_type=x_TD.dtype,
            rank=self.ep.rank,
            world_size=self.ep.size,
            hidden_dim=x_TD.shape[1],
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=x_TD.dtype.itemsize,
            max_num_inp_token_per_rank=self._max_share,
            num_experts_per_rank=num_experts // self.ep.size,
            num_experts_per_token=chosen,
            warp_num_per_block=warps,
            block_num=_blocks(blocks, x_TD.device),
            kernel_type=kernels,
            gpu_per_node=min(self.ep.size, gpus),
            rdma_block_num=rdma_blocks,
        )
        return mori.ops.EpDispatchCombineOp(config=config)


@cache
def _join(meeting: MeetingPoint, rank: int, ranks: int) -> None:
    """Join the symmetric memory of all ranks, once in a process; its id travels by the ranks' store."""
    import mori.shmem

    if rank == 0:
        meeting.store.set(_UNIQUE_ID, mori.shmem.shmem_get_unique_id())
    mori.shmem.shmem_init_attr(
        flags=mori.shmem.MORI_SHMEM_INIT_WITH_UNIQUEID,
        rank=rank,
        nranks=ranks,
        unique_id=meeting.store.get(_UNIQUE_ID),
    )


def _blocks(wanted: int, device: torch.device) -> int:
    """At most one block for each compute unit: they wait for one another, and must run at the same time."""
    return min(wanted, torch.cuda.get_device_properties(device).multi_processor_count)
