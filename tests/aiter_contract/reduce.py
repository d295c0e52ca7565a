"""AITER's all-reduce over the GPUs of a host, whose memory each maps: here over the ranks of a process group.

Release 0.1.7 passes tensors, the next one the addresses of its own buffers. A handle says which buffer of
which rank it is; peers read what lies in the registered buffer, so that it must hold the input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ADDRESSES = False
"""Whether this is the next release."""
GROUP: dist.ProcessGroup | None = None
"""The ranks."""
_META_BYTES = 5504
_HANDLE_BYTES = 64
_MOST_BYTES = 64 << 20


class _State:
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.registered: int | None = None


_state = _State()


def reset(group: dist.ProcessGroup | None, addresses: bool) -> None:
    global _state, ADDRESSES, GROUP
    _state, ADDRESSES, GROUP = _State(), addresses, group


def _group() -> dist.ProcessGroup:
    assert GROUP is not None, "no ranks"
    return GROUP


def _number(buffer: Any) -> int:
    """Which of the allocated buffers a tensor or an address is."""
    assert isinstance(buffer, int if ADDRESSES else Tensor) and not isinstance(buffer, bool)
    addresses = [each.data_ptr() for each in _state.buffers]
    address = buffer if isinstance(buffer, int) else buffer.data_ptr()
    assert address in addresses, "no buffer of AITER"
    return addresses.index(address)


def meta_size() -> int:
    return _META_BYTES


def allocate_meta_buffer(size: int) -> Any:
    # As much memory as the tests' rows need, of the size that was asked for.
    _state.buffers.append(torch.zeros(1, dtype=torch.uint8).expand(size) if size > _MOST_BYTES else _inbox())
    return _state.buffers[-1].data_ptr() if ADDRESSES else _state.buffers[-1]


def _inbox() -> Tensor:
    return torch.zeros(_MOST_BYTES, dtype=torch.uint8)


def _handle(buffer: Any) -> Tensor:
    handle = torch.zeros(_HANDLE_BYTES, dtype=torch.uint8)
    handle[0], handle[1] = _number(buffer), _group().rank()
    return handle


def get_meta_buffer_ipc_handle(**given: Any) -> Tensor | None:
    if not ADDRESSES:
        return _handle(given["inp"])
    handle, address = _handle(given["inp_ptr"]), given["out_handle_ptr"]
    torch.frombuffer(_memory(address), dtype=torch.uint8).copy_(handle)
    return None


def _memory(address: int) -> Any:
    import ctypes

    assert address not in [each.data_ptr() for each in _state.buffers], "the handle is written to the host"
    return (ctypes.c_uint8 * _HANDLE_BYTES).from_address(address)


def _check_handles(buffer: Any, handles: list[Any], offsets: list[int]) -> None:
    assert isinstance(handles, list) and all(type(each) is int for each in offsets)
    assert offsets == [0] * _group().size() and len(handles) == len(offsets)
    for rank, handle in enumerate(handles):
        held = torch.frombuffer(_memory(handle), dtype=torch.uint8) if ADDRESSES else handle
        assert held.dtype == torch.uint8 and held.device.type == "cpu"
        assert held[:2].tolist() == [_number(buffer), rank]


def init_custom_ar(offsets: list[int], rank: int, fully_connected: bool, **given: Any) -> int:
    assert type(rank) is int and rank == _group().rank() and fully_connected is True
    if ADDRESSES:
        meta, handles = given["meta_ptr"], given["ipc_handle_ptrs"]
        assert given["rank_data_sz"] == 8 << 20 and given["rank_data_ptr"] > 1 << 24
    else:
        meta, handles = given["meta"], given["handles"]
        assert given["rank_data"].nbytes == 8 << 20 and given["rank_data"].dtype == torch.uint8
    _check_handles(meta, handles, offsets)
    assert _state.buffers[_number(meta)].numel() == _META_BYTES + (1 + ADDRESSES) * _MOST_BYTES
    return 77


def register_buffer(_fa: int, t: Tensor, handles: list[Tensor], offsets: list[int]) -> None:
    assert type(_fa) is int and _fa == 77
    _check_handles(t, handles, offsets)
    _state.registered = _number(t)


def register_input_buffer(_fa: int, self_ptr: int, ipc_handle_ptrs: list[int], offsets: list[int]) -> None:
    assert type(_fa) is int and _fa == 77
    _check_handles(self_ptr, ipc_handle_ptrs, offsets)
    _state.registered = _number(self_ptr)


def _sum(context: int, inp: Tensor, out: Tensor, buffer: Any, size: int) -> Tensor:
    """In float32 and rank order."""
    assert type(context) is int and context == 77
    assert _number(buffer) == _state.registered and size == _MOST_BYTES
    assert inp.is_contiguous() and out.is_contiguous() and inp.dtype == out.dtype and inp.shape == out.shape
    assert inp.nbytes % 16 == 0 and inp.nbytes <= size and _group().size() in (2, 4, 6, 8)
    inbox = _state.buffers[_state.registered]
    inbox[: inp.nbytes].copy_(inp.reshape(-1).view(torch.uint8))
    sent = inbox[: inp.nbytes].view(inp.dtype).view(inp.shape)
    parts = [torch.empty_like(inp) for _ in range(_group().size())]
    dist.all_gather(parts, sent.contiguous(), group=GROUP)
    return torch.stack(parts).float().sum(0)


def all_reduce(_fa: int, inp: Tensor, out: Tensor, open_fp8_quant: bool, **given: Any) -> None:
    assert open_fp8_quant is False, "sums are not rounded to 8 bits"
    if ADDRESSES:
        assert given["use_new"] is True
        buffer, size = given["reg_inp_ptr"], given["reg_inp_bytes"]
    else:
        buffer, size = given["reg_buffer"], given["reg_buffer"].nbytes
    out.copy_(_sum(_fa, inp, out, buffer, size))


def fused_allreduce_rmsnorm(
    _fa: int,
    inp: Tensor,
    res_inp: Tensor,
    res_out: Tensor,
    out: Tensor,
    w: Tensor,
    eps: float,
    reg_ptr: int,
    reg_bytes: int,
    use_1stage: bool,
) -> None:
    """Rows of 1, 2, ... 32 KiB."""
    assert ADDRESSES, "0.1.7 computes with the whole part of epsilon"
    row = w.numel() * w.element_size()
    assert row % 1024 == 0 and row <= 32768 and w.shape == inp.shape[1:] and w.dtype == inp.dtype
    assert res_inp.shape == inp.shape and res_inp.dtype == inp.dtype and res_inp.is_contiguous()
    assert isinstance(eps, float) and 0 < eps < 1 and use_1stage is False and res_out.is_contiguous()
    total = _sum(_fa, inp, out, reg_ptr, reg_bytes) + res_inp.float()
    res_out.copy_(total)
    rows = res_out.float()
    out.copy_(rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps) * w.float())


SEMANTICS: dict[str, Callable[..., Any]] = {
    "aiter.meta_size": meta_size,
    "aiter.allocate_meta_buffer": allocate_meta_buffer,
    "aiter.get_meta_buffer_ipc_handle": get_meta_buffer_ipc_handle,
    "aiter.init_custom_ar": init_custom_ar,
    "aiter.register_buffer": register_buffer,
    "aiter.register_input_buffer": register_input_buffer,
    "aiter.all_reduce": all_reduce,
    "aiter.fused_allreduce_rmsnorm": fused_allreduce_rmsnorm,
}
"""What several ranks call."""
SWAPS = {
    False: [
        ("aiter.init_custom_ar", "meta", "rank_data"),
        ("aiter.init_custom_ar", "handles", "offsets"),
        ("aiter.init_custom_ar", "rank", "fully_connected"),
        ("aiter.register_buffer", "_fa", "t"),
        ("aiter.register_buffer", "handles", "offsets"),
        ("aiter.all_reduce", "inp", "out"),
        ("aiter.all_reduce", "_fa", "open_fp8_quant"),
        ("aiter.all_reduce", "out", "reg_buffer"),
    ],
    True: [
        ("aiter.get_meta_buffer_ipc_handle", "inp_ptr", "out_handle_ptr"),
        ("aiter.init_custom_ar", "meta_ptr", "rank_data_ptr"),
        ("aiter.init_custom_ar", "rank_data_sz", "rank"),
        ("aiter.init_custom_ar", "ipc_handle_ptrs", "offsets"),
        ("aiter.register_input_buffer", "_fa", "self_ptr"),
        ("aiter.register_input_buffer", "ipc_handle_ptrs", "offsets"),
        ("aiter.all_reduce", "inp", "out"),
        ("aiter.all_reduce", "use_new", "open_fp8_quant"),
        ("aiter.all_reduce", "reg_inp_ptr", "reg_inp_bytes"),
        ("aiter.fused_allreduce_rmsnorm", "inp", "out"),
        ("aiter.fused_allreduce_rmsnorm", "res_inp", "res_out"),
        ("aiter.fused_allreduce_rmsnorm", "out", "res_out"),
        ("aiter.fused_allreduce_rmsnorm", "w", "eps"),
        ("aiter.fused_allreduce_rmsnorm", "reg_ptr", "reg_bytes"),
        ("aiter.fused_allreduce_rmsnorm", "_fa", "use_1stage"),
    ],
}
"""Arguments that a call must not confuse; by whether it is the next release."""
