"""All-reduce by AITER's kernels, through memory that the GPUs of one host map from each other.

Rows are copied into a buffer that the other GPUs read, so that graphs can capture the calls as they are.
AITER 0.1.7 passes tensors and takes the norm's epsilon as a whole number, so that its fused norm is not
used; the next release passes addresses and has mended that.
"""

import inspect
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from atom_ops import add_rms_norm

MOST_BYTES = 64 << 20
"""Most bytes of one call. AITER leaves larger ones to RCCL, which is as fast there."""
_SIZES = (2, 4, 6, 8)
_FUSED_SIZES = (2, 4, 8)
_FUSED_ROW_BYTES = 1024, 32768
_ALIGNED = 16
_TENSORS = frozenset(("_fa", "inp", "out", "open_fp8_quant", "reg_buffer"))
_ADDRESSES = frozenset(("_fa", "inp", "out", "use_new", "open_fp8_quant", "reg_inp_ptr", "reg_inp_bytes"))
_RANK_DATA_BYTES = 8 << 20
_HANDLE_BYTES = 64


class AiterMemory:
    """Sums rows of one width and dtype over the ranks of a group, on the GPUs of one host."""

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device):
        """All ranks of the group call this together. Raises RuntimeError if memory cannot be mapped."""
        import aiter

        self._width = width
        self._dtype = dtype
        row_bytes = width * dtype.itemsize
        least, most = _FUSED_ROW_BYTES
        whole_rows = row_bytes % least == 0 and row_bytes <= most
        parameters = frozenset(inspect.signature(aiter.all_reduce).parameters)
        if parameters == _TENSORS:
            self._kernels: _Kernels = _WithTensors(group, device)
            self._fused = False
        elif parameters == _ADDRESSES:
            self._kernels = _WithAddresses(group, device)
            self._fused = whole_rows and group.size() in _FUSED_SIZES
        else:
            raise RuntimeError(f"this release of AITER has another all_reduce, of {', '.join(parameters)}")

    def fits(self, x: Tensor) -> bool:
        """Whether AITER sums these rows; the same on every rank."""
        rows = x.dim() == 2 and x.shape[1] == self._width and x.dtype is self._dtype
        return rows and 0 < x.nbytes <= MOST_BYTES and x.nbytes % _ALIGNED == 0

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether the norm runs in the same kernel, for a weight of the dtype of `x`."""
        return self._fused and self.fits(x)

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """The sum of the ranks' `x_TD`; another tensor. In rank order, in float32."""
        out_TD = torch.empty_like(x_TD)
        self._kernels.all_reduce(x_TD, out_TD)
        return out_TD

    def all_reduce_add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `Communicator.all_reduce_add_rms_norm`."""
        if weight_D.dtype is not self._dtype:
            return add_rms_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)
        normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        self._kernels.all_reduce_add_rms_norm(
            x_TD, residual_TD.contiguous(), total_TD, normed_TD, weight_D, eps
        )
        return normed_TD, total_TD


def supports(ranks: int, width: int, dtype: torch.dtype) -> bool:
    """Whether AITER has kernels for so many ranks and such rows."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    return ranks in _SIZES and dtype in dtypes and width * dtype.itemsize % _ALIGNED == 0


class _Kernels(Protocol):
    """The calls of one release; `x` is contiguous."""

    def all_reduce(self, x: Tensor, out: Tensor) -> None: ...

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, out: Tensor, weight: Tensor, eps: float
    ) -> None: ...


class _WithTensors:
    """Calls of AITER 0.1.7."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        import aiter

        ranks = group.size()
        # By AITER's own allocator: a handle then names the buffer, not the block of torch that it is in.
        self._signals = aiter.allocate_meta_buffer(size=aiter.meta_size() + MOST_BYTES)
        self._inbox = aiter.allocate_meta_buffer(size=MOST_BYTES)
        self._rank_data = torch.empty(_RANK_DATA_BYTES, dtype=torch.uint8, device=device)
        self._context: Any = aiter.init_custom_ar(
            meta=self._signals,
            rank_data=self._rank_data,
            handles=_exchanged(aiter.get_meta_buffer_ipc_handle(inp=self._signals), group, device),
            offsets=[0] * ranks,
            rank=group.rank(),
            fully_connected=True,
        )
        aiter.register_buffer(
            _fa=self._context,
            t=self._inbox,
            handles=_exchanged(aiter.get_meta_buffer_ipc_handle(inp=self._inbox), group, device),
            offsets=[0] * ranks,
        )

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        import aiter

        aiter.all_reduce(_fa=self._context, inp=x, out=out, open_fp8_quant=False, reg_buffer=self._inbox)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, out: Tensor, weight: Tensor, eps: float
    ) -> None:
        raise NotImplementedError("AITER 0.1.7 has no kernel with a fraction as epsilon")


class _WithAddresses:
    """Calls of the next release."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        import aiter

        ranks = group.size()
        self._signals: Any = aiter.allocate_meta_buffer(size=aiter.meta_size() + 2 * MOST_BYTES)
        self._inbox: Any = aiter.allocate_meta_buffer(size=MOST_BYTES)
        self._rank_data = torch.empty(_RANK_DATA_BYTES, dtype=torch.uint8, device=device)
        handles = _exchanged(self._handle(self._signals), group, device)
        self._context: Any = aiter.init_custom_ar(
            meta_ptr=self._signals,
            rank_data_ptr=self._rank_data.data_ptr(),
            rank_data_sz=_RANK_DATA_BYTES,
            ipc_handle_ptrs=[each.data_ptr() for each in handles],
            offsets=[0] * ranks,
            rank=group.rank(),
            fully_connected=True,
        )
        handles = _exchanged(self._handle(self._inbox), group, device)
        aiter.register_input_buffer(
            _fa=self._context,
            self_ptr=self._inbox,
            ipc_handle_ptrs=[each.data_ptr() for each in handles],
            offsets=[0] * ranks,
        )

    def _handle(self, address: int) -> Tensor:
        import aiter

        handle = torch.empty(_HANDLE_BYTES, dtype=torch.uint8)
        aiter.get_meta_buffer_ipc_handle(inp_ptr=address, out_handle_ptr=handle.data_ptr())
        return handle

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        import aiter

        aiter.all_reduce(
            _fa=self._context,
            inp=x,
            out=out,
            use_new=True,
            open_fp8_quant=False,
            reg_inp_ptr=self._inbox,
            reg_inp_bytes=MOST_BYTES,
        )

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, out: Tensor, weight: Tensor, eps: float
    ) -> None:
        import aiter

        aiter.fused_allreduce_rmsnorm(
            _fa=self._context,
            inp=x,
            res_inp=residual,
            res_out=total,
            out=out,
            w=weight,
            eps=eps,
            reg_ptr=self._inbox,
            reg_bytes=MOST_BYTES,
            use_1stage=False,
        )


def _exchanged(handle: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """The handle of every rank, uint8 on the host, in rank order."""
    mine = handle.to(device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return [each.cpu() for each in found]
