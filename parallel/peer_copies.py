"""All-reduce between two GPUs by their copy engines, while the kernels of both run.

    main stream    GEMM 0 │ GEMM 1 │ … │ sum 0 │ …      each rank sums its own rows and the received ones,
    copy engine           │ send 0 │ send 1 │ …         and normalises all of them

A copy engine needs no SM. A kernel that sends rows takes SMs from a GEMM, most of which have one program on
every SM: on two H200s such steps took longer than without overlap.

Rows travel through slots of the receiver's memory, used in rotation. After the rows the engine copies a flag;
the kernel that sums them waits for it and clears it. Both ranks send and sum in the same order.

A slot is free when it is used again. In a step of P parts each rank sums part j before it sends part j + P.
So when the other rank sends j + 2 P, it has received j + P; before it sent that, this rank summed j. A step
begins with the embedding's all-reduce, which follows all sums of the step before on both ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

RANKS = 2
_SLOTS = 8
_MOST_PARTS = _SLOTS // 2
_BYTES = 256 << 20


class PeerCopies:
    """Sums rows of one width and dtype over two ranks, while their GPUs compute."""

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device):
        """Both ranks call this together, and wait for each other before the first sum.

        Takes 256 MiB of the device's memory. Raises RuntimeError if it cannot be mapped.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        self._device = device
        other = 1 - group.rank()
        self._rows = _BYTES // (_SLOTS * width * dtype.itemsize)
        shape = _SLOTS, self._rows, width
        self._received = symmetric_memory.empty(shape, dtype=dtype, device=device)
        self._flags = symmetric_memory.empty((_SLOTS,), dtype=torch.int32, device=device)
        self._flags.zero_()
        self._sent = symmetric_memory.rendezvous(self._received, group).get_buffer(other, shape, dtype)
        flags = symmetric_memory.rendezvous(self._flags, group)
        self._sent_flags = flags.get_buffer(other, (_SLOTS,), torch.int32)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(_SLOTS, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)
        self._next = 0
        torch.cuda.synchronize(device)

    def begin_step(self, x_TD: Tensor) -> int:
        """Number of parts in which the step that begins sends such rows; 1 if they do not fit."""
        self._next = 0  # a graph replays the slots of its capture
        parts = max(-(-len(x_TD) // self._rows), 2)
        fits = x_TD.shape[1:] == self._received.shape[2:] and x_TD.dtype is self._received.dtype
        return parts if fits and parts <= _MOST_PARTS else 1

    def begin(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Send `x_TD` to the other rank; the function returned sums, as `all_reduce_add_rms_norm`.

        Functions have to be called in the order in which they were made.
        """
        from atom_ops.triton_impl.experts.received_rows import add_received_rows

        slot = self._next
        self._next = (self._next + 1) % _SLOTS
        flag = slice(slot, slot + 1)
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            self._sent[slot, : len(x_TD)].copy_(x_TD, non_blocking=True)
            self._sent_flags[flag].copy_(self._one, non_blocking=True)
            sent = self._stream.record_event()

        def end() -> tuple[Tensor, Tensor]:
            main.wait_event(sent)  # until then the engine reads `x_TD`
            received_TD = self._received[slot, : len(x_TD)]
            arrival = self._flags[flag], self._seen[flag]
            return add_received_rows(x_TD, received_TD, arrival, residual_TD, weight_D, eps)

        return end
