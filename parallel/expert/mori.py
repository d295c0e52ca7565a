"""MORI, AMD's all-to-all library, as a form of dispatch; imported on ROCm only, when it is chosen."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from atom.shared.utils import optional_library
from parallel.expert.all_to_all import owners
from parallel.expert.dispatch import PlannedDispatch, RoutedTokens
from parallel.expert.mori_plan import (
    Kernels,
    Tokens,
    check_tokens,
    kernels_for,
    op_kernels,
    reserve_heap,
    symmetric_bytes,
)
from parallel.mesh import Mesh
from parallel.rendezvous import MeetingPoint

if TYPE_CHECKING:
    from mori.ops import EpDispatchCombineOp

_UNIQUE_ID = "mori_unique_id"


def mori_problem(device: torch.device) -> str | None:
    """Why MORI cannot run on that device, or None."""
    if device.type != "cuda" or torch.version.hip is None:
        return "MORI needs an AMD GPU and torch for ROCm"
    if find_spec("mori") is None:
        return "amd-mori is not installed: pip install 'atom-serve[rocm]'"
    return mori_failure(device)


def mori_failure(device: torch.device) -> str | None:
    """Why MORI, which is installed, cannot be used on that AMD GPU, and what to do; else None."""
    on_rocm = device.type == "cuda" and torch.version.hip is not None
    return optional_library.problem(optional_library.MORI) if on_rocm else None


class MoriDispatch(PlannedDispatch):
    """Dispatch and combine by `mori.ops.EpDispatchCombineOp`: a token once to each rank that needs it.

    The tokens arrive in symmetric memory of a fixed size, which the next dispatch overwrites; how many
    arrived is known on the device alone, so that graphs can capture it. Which kernels run depends on the
    nodes and on the planned tokens of the fullest rank, so that all ranks launch the same.
    """

    def __init__(self, mesh: Mesh, max_tokens: int, nodes: int = 1):
        """`max_tokens`: the most of a data-parallel rank in a step. Memory is reserved by the first one.

        The ranks are spread evenly over `nodes`, as `mori_plan.layout_problem` wants them.
        """
        super().__init__(mesh)
        self._mesh = mesh
        self._nodes = nodes
        share = max(self._share_of(max_tokens), 1)
        self._kernels = kernels_for(nodes, share, _compute_units(mesh.device), mesh.ep.size)
        self._running = self._kernels[-1]
        self._reserved: Tokens | None = None
        self._ops: dict[str, EpDispatchCombineOp] = {}

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """Raises ValueError unless every rank has the same number of experts."""
        if num_experts % self.ep.size:
            raise ValueError(
                f"MORI cannot spread {num_experts} experts evenly over {self.ep.size} ranks; "
                "use --all2all-backend allgather_reducescatter or alltoall"
            )
        return super().local_experts(num_experts)

    def reserve(self, hidden: int, dtype: torch.dtype, top_k: int, num_experts: int) -> None:
        """Also raises ValueError for tokens that MORI does not send, and for a heap that is too small."""
        tokens = Tokens(hidden, dtype, top_k, num_experts)
        check_tokens(tokens)
        if self._reserved not in (None, tokens):
            raise ValueError(f"MORI sends tokens of one kind, not {self._reserved} and {tokens}")
        self._reserved = tokens
        self.reserved_bytes = symmetric_bytes(self._kernels, tokens, self.ep.size, self._nodes)
        reserve_heap(self.reserved_bytes)

    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        super().plan(tokens, eager)
        self._choose(max(tokens))

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        """Raises ValueError for another number of tokens than was planned."""
        tokens = x_TD.shape[0]
        planned = self._planned(tokens)
        most = sum(planned)  # a rank gets no token twice
        self._choose(max(planned))
        if not self._ops:
            self._open(Tokens(x_TD.shape[1], x_TD.dtype, topk_ids_TJ.shape[1], num_experts))
        share = self._share(tokens)
        nowhere = owners(topk_ids_TJ, num_experts, self.ep.size) == self.ep.size
        # MORI has no id for "no expert": such a pair goes to an expert of this rank, with weight 0.
        first, _ = self.local_experts(num_experts)
        topk_ids_SJ = topk_ids_TJ.where(~nowhere, first)[share].int().contiguous()
        topk_weights_SJ = topk_weights_TJ.where(~nowhere, 0.0)[share].contiguous()
        x_MD, topk_weights_MJ, topk_ids_MJ, arrived_1 = self._send(
            x_TD[share].contiguous(), topk_weights_SJ, topk_ids_SJ
        )
        self._last = tokens, share, topk_ids_SJ
        valid_M1 = torch.arange(most, device=x_TD.device).unsqueeze(1) < arrived_1
        topk_ids_MJ = topk_ids_MJ[:most].long().where(valid_M1, -1)
        return RoutedTokens(x_MD[:most], topk_ids_MJ, topk_weights_MJ[:most])

    def combine(self, out_MD: Tensor) -> Tensor:
        tokens, share, topk_ids_SJ = self._last
        sums_SD = self._return(out_MD.contiguous(), topk_ids_SJ)
        return functional.pad(sums_SD[: len(topk_ids_SJ)], (0, 0, share.start, tokens - share.stop))

    def _choose(self, tokens: int) -> None:
        """Choose the kernels for a step in which the fullest data-parallel rank has that many tokens."""
        share = self._share_of(tokens)
        fitting = [each for each in self._kernels if share <= each.max_tokens]
        if not fitting:
            raise ValueError(f"{tokens} tokens in a step: MORI has reserved {self._kernels[-1].max_tokens}")
        self._running = fitting[0]

    def _share_of(self, tokens: int) -> int:
        return -(-tokens // self._tp.size)

    def _send(
        self, x_SD: Tensor, topk_weights_SJ: Tensor, topk_ids_SJ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, weights and ids in MORI's buffers, and [1]: how many rows of them arrived."""
        op: EpDispatchCombineOp = self._ops[self._running.name]
        launch = self._running.launch
        if self._running.asynchronous:
            x, weights, _, ids, arrived = op.dispatch_send(
                input=x_SD,
                weights=topk_weights_SJ,
                scales=None,
                indices=topk_ids_SJ,
                block_num=launch.blocks,
                warp_per_block=launch.warps,
            )
            op.dispatch_recv(block_num=launch.blocks, warp_per_block=launch.warps)
        else:
            # Without numbers MORI would launch 256 blocks on one node, which wait for one another.
            x, weights, _, ids, arrived = op.dispatch(
                input=x_SD,
                weights=topk_weights_SJ,
                scales=None,
                indices=topk_ids_SJ,
                block_num=launch.blocks,
                rdma_block_num=launch.rdma_blocks,
                warp_per_block=launch.warps,
            )
        return x, weights, ids, arrived

    def _return(self, out_MD: Tensor, topk_ids_SJ: Tensor) -> Tensor:
        """The sums of this rank's tokens, in MORI's buffer. The experts have applied the weights."""
        op: EpDispatchCombineOp = self._ops[self._running.name]
        launch = self._running.launch
        if self._running.asynchronous:
            sums, _ = op.combine_send(
                input=out_MD,
                weights=None,
                indices=topk_ids_SJ,
                block_num=launch.blocks,
                warp_per_block=launch.warps,
            )
            op.combine_recv(block_num=launch.blocks, warp_per_block=launch.warps)
        else:
            sums, _ = op.combine(
                input=out_MD,
                weights=None,
                indices=topk_ids_SJ,
                block_num=launch.blocks,
                rdma_block_num=launch.rdma_blocks,
                warp_per_block=launch.warps,
            )
        return sums

    def _open(self, tokens: Tokens) -> None:
        """MORI's ops for this model, of all kernels; every rank calls this in its first, eager step."""
        if self._reserved != tokens:
            self.reserve(*tokens)
        assert self._mesh.meeting is not None, "several ranks have met"
        kernels = op_kernels(self._kernels)
        for each in kernels:
            _compile(each)
        _join(self._mesh.meeting, self.ep.rank, self.ep.size)
        self._ops = {each.name: self._opened(each, tokens) for each in kernels}

    def _opened(self, kernels: Kernels, tokens: Tokens) -> "EpDispatchCombineOp":
        import mori.ops

        config = mori.ops.EpDispatchCombineConfig(
            data_type=tokens.dtype,
            rank=self.ep.rank,
            world_size=self.ep.size,
            hidden_dim=tokens.hidden,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=tokens.dtype.itemsize,
            max_num_inp_token_per_rank=kernels.max_tokens,
            num_experts_per_rank=tokens.experts // self.ep.size,
            num_experts_per_token=tokens.top_k,
            warp_num_per_block=kernels.launch.warps,
            block_num=kernels.launch.blocks,
            kernel_type=_kernel_type(kernels),
            gpu_per_node=self.ep.size // self._nodes,
            rdma_block_num=kernels.launch.rdma_blocks,
            num_qp_per_pe=kernels.queue_pairs,
        )
        return mori.ops.EpDispatchCombineOp(config=config)


def _kernel_type(kernels: Kernels) -> object:
    import mori.ops

    match kernels.name:
        case "IntraNode":
            return mori.ops.EpDispatchCombineKernelType.IntraNode
        case "InterNodeV1":
            return mori.ops.EpDispatchCombineKernelType.InterNodeV1
        case "InterNodeV1LL":
            return mori.ops.EpDispatchCombineKernelType.InterNodeV1LL
        case "AsyncLL":
            return mori.ops.EpDispatchCombineKernelType.AsyncLL


def _compile(kernels: Kernels) -> None:
    """Compile them before the ranks connect: it may take minutes, once on a machine."""
    import mori.ops.dispatch_combine

    mori.ops.dispatch_combine.warmup_jit_kernels(kernel_type=_kernel_type(kernels))


@cache
def _join(meeting: MeetingPoint, rank: int, ranks: int) -> None:
    """Join the symmetric memory of all ranks, once in a process; its id travels by the ranks' store."""
    import mori.shmem

    if rank == 0:
        meeting.store.set(_UNIQUE_ID, mori.shmem.shmem_get_unique_id())
    status = mori.shmem.shmem_init_attr(
        flags=mori.shmem.MORI_SHMEM_INIT_WITH_UNIQUEID,
        rank=rank,
        nranks=ranks,
        unique_id=meeting.store.get(_UNIQUE_ID),
    )
    if status:
        raise RuntimeError(
            f"MORI cannot join the symmetric memory of {ranks} ranks (status {status}): its messages above "
            "say why; --all2all-backend allgather_reducescatter or alltoall needs none"
        )


def _compute_units(device: torch.device) -> int:
    """Compute units of the GPU; for a plan without one, those of an MI300X."""
    if device.type == "meta":
        return 304
    return torch.cuda.get_device_properties(device).multi_processor_count
