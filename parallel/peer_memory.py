"""All-reduce through memory that the GPUs of one host map from each other."""

from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import get_logger
from atom_ops.op import REGISTRY
from parallel.aiter_memory import AiterMemory
from parallel.aiter_memory import supports as aiter_supports
from parallel.peer_copies import PeerCopies

_INBOX_BYTES = 256 << 20
_MOST_ROWS = 8192
_MOST_RANKS = 8
# Measured on H200s: beyond it sending every row to every rank takes longer than waiting twice.
_ONE_SHOT_BYTES = 256 << 10


class PeerMemory:
    """Sums rows of one width and dtype over the ranks of a group, on GPUs, without NCCL."""

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device):
        """All ranks of the group call this together, and wait for each other before the first sum.

        Takes up to 256 MiB of the device's memory. Raises RuntimeError if it cannot be mapped.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        from atom_ops.triton_impl.elementwise.all_reduce import EMPTY, Inboxes, bits_of

        ranks = group.size()
        self.width = width
        self.dtype = dtype
        self.device = device
        self._ranks = ranks
        rows = min(_MOST_ROWS, _INBOX_BYTES // (2 * ranks * width * dtype.itemsize))
        stride = rows * width
        self._inbox = symmetric_memory.empty(2 * ranks * stride, dtype=bits_of(dtype), device=device)
        mapped = symmetric_memory.rendezvous(self._inbox, group)
        self._inbox.fill_(EMPTY)
        addresses = torch.tensor(mapped.buffer_ptrs, dtype=torch.int64, device=device)
        turns = torch.zeros(rows, dtype=torch.int32, device=device)
        self._inboxes = Inboxes(group.rank(), addresses, stride, turns)
        torch.cuda.synchronize(device)

    def fits(self, x: Tensor) -> bool:
        """Whether these rows have the width and dtype; the same on every rank."""
        return x.dim() == 2 and x.shape[1] == self.width and x.dtype is self.dtype

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether the norm that follows runs in the same kernel."""
        return self.fits(x)

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """The sum of the ranks' `x_TD`; another tensor."""
        return self._sum(x_TD, None, None, 0.0)[1]

    def all_reduce_add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `Communicator.all_reduce_add_rms_norm`."""
        return self._sum(x_TD, residual_TD, weight_D, eps)

    def _sum(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.elementwise.all_reduce import all_reduce_rows

        two_shots = self._ranks > 2 and x_TD.nbytes > _ONE_SHOT_BYTES
        return all_reduce_rows(x_TD, residual_TD, weight_D, eps, self._inboxes, two_shots)


Peers = PeerMemory | AiterMemory


def open_peer_memory(
    group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device
) -> Peers | None:
    """The peer memory of a group, all of whose ranks call this together, after `backend.resolve`.

    None where its kernels cannot run, or the ranks' GPUs cannot write each other's memory.
    """
    kind = _kind(group.size(), width, dtype, device)
    # AITER may be broken for one rank alone.
    if not _on_all_ranks(kind is not None, group, device):
        return None
    assert kind is not None
    if not _reach_each_other(group, device):
        get_logger().info("all-reduces run on NCCL or RCCL: these GPUs cannot write each other's memory")
        return None
    memory = None
    try:
        memory = kind(group, width, dtype, device)
    except (RuntimeError, TypeError, ValueError) as error:
        get_logger().warning(
            "all-reduces run on NCCL or RCCL: peer memory cannot be used here: %s", one_line(error)
        )
    # Also: no rank may send before every inbox is empty.
    return memory if _on_all_ranks(memory is not None, group, device) else None


def open_peer_copies(group: dist.ProcessGroup, memory: PeerMemory) -> PeerCopies | None:
    """Copies between the two ranks of `memory`, which call this together; None if they cannot be made."""
    copies = None
    try:
        copies = PeerCopies(group, memory.width, memory.dtype, memory.device)
    except RuntimeError as error:
        get_logger().warning(
            "all-reduces run after the GEMMs, not during them: peer memory cannot be used: %s",
            one_line(error),
        )
    # Also: no rank may send before every flag is zero.
    return copies if _on_all_ranks(copies is not None, group, memory.device) else None


def _kind(
    ranks: int, width: int, dtype: torch.dtype, device: torch.device
) -> type[PeerMemory] | type[AiterMemory] | None:
    """The class that sums such rows: AITER's where its norm runs too, else ours; None where neither can."""
    if "aiter" in REGISTRY["add_rms_norm"].order:
        return AiterMemory if aiter_supports(ranks, width, dtype) else None
    # AMD GPUs would need another kernel: they order remote writes differently.
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return None
    from atom_ops.triton_impl.elementwise.all_reduce import supports_width

    return PeerMemory if supports_width(width) and ranks <= _MOST_RANKS else None


def _reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank is on this host, and its GPU can access those of all others."""
    boot = crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    mine = torch.tensor([boot, device.index], device=device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    others = [
        (host, index) for host, index in torch.stack(found).tolist() if (host, index) != (boot, device.index)
    ]
    reached = len(others) == group.size() - 1 and all(
        host == boot and torch.cuda.can_device_access_peer(device.index, index) for host, index in others
    )
    return _on_all_ranks(reached, group, device)


def _on_all_ranks(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    everywhere = torch.tensor(int(mine), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return bool(everywhere.item())
