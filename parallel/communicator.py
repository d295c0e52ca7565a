"""The collectives that a model's layers call."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from atom_ops import add_rms_norm
from parallel.peer_copies import RANKS, PeerCopies
from parallel.peer_memory import PeerMemory, Peers, open_peer_copies, open_peer_memory

# torch 2.13 renames both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator:
    """Collectives of one process group; no-ops with one rank, which needs no process group.

    Every rank must call the same collectives in the same order. If a rank is missing, the others
    raise torch's RuntimeError after the group's timeout.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        fused_norm: bool = True,
    ) -> None:
        """`rank` is this process's rank among the group's `size` ranks.

        Without a process group several ranks can be described, to shard weights, but not called.
        `fused_norm`: the norm that follows an all-reduce may run in its kernel.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not among {size} ranks")
        self.rank = rank
        self.size = size
        self._process_group = process_group
        self._peers: Peers | None = None
        self._copies: PeerCopies | None = None
        self._fused_norm = fused_norm

    def open_peers(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reduce rows of that width and dtype through peer memory from now on, if the GPUs can.

        All ranks call this together. Ranks without a process group have no peers.
        """
        if self._process_group is not None:
            self._peers = open_peer_memory(self._process_group, width, dtype, device)

    def open_copies(self) -> None:
        """Let large sums overlap with other kernels from now on, if peer memory is open between two GPUs.

        All ranks call this together, after `open_peers`.
        """
        if isinstance(self._peers, PeerMemory) and self.size == RANKS and self._fused_norm:
            self._copies = open_peer_copies(self._group, self._peers)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; `x` must be contiguous, and may be overwritten.

        The result is bitwise equal on all ranks.
        """
        if self._peers is not None and self._peers.fits(x):
            return self._peers.all_reduce(x)
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def all_reduce_add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum + residual), sum + residual), where sum is that of the ranks' `x_TD`.

        `x_TD` must be contiguous and may be overwritten; the residual is the same on every rank. The
        results are bitwise equal on all ranks.
        """
        if self._peers is not None and self.fuses_norm(x_TD):
            return self._peers.all_reduce_add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return add_rms_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)

    def begin_step_in_parts(self, x_TD: Tensor) -> int:
        """Number of parts in which a step sums rows like `x_TD` while other kernels run; 1: it cannot.

        `x_TD` are the step's embeddings; called after their all-reduce.
        """
        return 1 if self._copies is None else self._copies.begin_step(x_TD)

    def begin_all_reduce_add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin `all_reduce_add_rms_norm` of a part of the tokens; the function ends it.

        A step has the parts of `begin_step_in_parts`, in the same order in every layer. Each part is ended
        before it begins again.
        """
        if self._copies is not None:
            return self._copies.begin(x_TD, residual_TD, weight_D, eps)
        both = self.all_reduce_add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return lambda: both

    def fuses_norm(self, x_TD: Tensor) -> bool:
        """Whether one kernel computes `all_reduce_add_rms_norm` of such a tensor."""
        return self._fused_norm and self._peers is not None and self._peers.fuses_norm(x_TD)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank; it is contiguous, and of the same shape and dtype on all."""
        if self.size > 1:
            dist.broadcast(x, group=self._group, group_src=0)
        return x

    def all_gather_last_dim(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the ranks' `x` along the last dimension, in rank order.

        `sizes[r]` is the last dimension of rank r's tensor; the other dimensions are equal.
        """
        if self.size == 1:
            return x
        widest = max(sizes)
        if min(sizes) == widest:
            # One copy; none if the other dimensions are of size 1.
            return self._gathered(x.contiguous()).movedim(0, -2).flatten(-2)
        gathered = self._gathered(functional.pad(x, (0, widest - x.shape[-1])))
        parts = [part[..., :size] for part, size in zip(gathered, sizes, strict=True)]
        return torch.cat(parts, dim=-1)

    def all_gather_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the ranks' `x` along the first dimension, in rank order.

        `sizes[r]` is the first dimension of rank r's tensor, which may be 0; the others are equal.
        """
        if self.size == 1:
            return x
        most = max(sizes)
        gathered = self._gathered(_padded_rows(x, most))
        if min(sizes) == most:
            return gathered.flatten(0, 1)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    def reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over the ranks, of which each keeps its rows: the inverse of `all_gather_rows`.

        `x` has sum(sizes) rows on every rank, and the result of rank r has sizes[r].
        """
        if self.size == 1:
            return x
        most = max(sizes)
        if min(sizes) < most:
            x = torch.cat([_padded_rows(part, most) for part in x.split(list(sizes))])
        summed = x.new_empty(most, *x.shape[1:])
        _reduce_scatter(summed, x.contiguous(), group=self._group)
        return summed[: sizes[self.rank]]

    def all_to_all_rows(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Send sent[r] rows of `x` to each rank r, in rank order; returns the rows of all ranks for this one.

        received[r] is the number of rows from rank r. `x` has sum(sent) rows; `out`, if given, has room
        for sum(received).
        """
        if self.size == 1:
            return x if out is None else out[: len(x)].copy_(x)
        found = x.new_empty(sum(received), *x.shape[1:]) if out is None else out[: sum(received)]
        dist.all_to_all_single(found, x.contiguous(), list(received), list(sent), group=self._group)
        return found

    def _gathered(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: the contiguous `x` of every rank, of the same shape."""
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered.flatten(0, 1), x, group=self._group)
        return gathered

    def close(self) -> None:
        """Forget the process group, which the mesh destroys."""
        self._process_group = self._peers = self._copies = None

    @property
    def _group(self) -> dist.ProcessGroup:
        # Without it torch would use its default group, which has other ranks.
        if self._process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group: not joined, or closed")
        return self._process_group


def _padded_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zeros below, up to `rows` rows; contiguous."""
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
