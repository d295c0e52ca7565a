"""Calls of the kernels, with arguments in words of 8 bytes: see `calls.h`.

Calls can be kept, and made later, together and more than once, without Python between them. In traces of
torch's profiler a kernel is an operator called native::NAME, where it is called in `named`.
"""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from atom_ops.native_impl import build

DTYPES = {getattr(torch, name): name for name in build.DTYPES}
"""dtypes of the kernels' values, with their names."""

Argument = Tensor | float | None
"""A tensor is passed by its address, None as a null pointer."""


class _Entry(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("letters", ctypes.c_char_p), ("run", ctypes.c_void_p))


_Run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class _Kernel:
    name: str
    address: int
    run: Callable[[bytes], None]
    words: struct.Struct


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call to be made."""

    name: str
    address: int
    words: bytes
    tensors: Sequence[Tensor]
    """Those whose addresses are among the words."""


_keep: Callable[[KernelCall], None] | None = None


def has(name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for this CPU's instructions."""
    return name in _kernels(dtype)


def call(name: str, dtype: torch.dtype, *args: Argument) -> None:
    """Call a kernel, or keep the call. Raises struct.error for arguments that do not have its types."""
    kernel = _kernels(dtype)[name]
    words = kernel.words.pack(*[arg.data_ptr() if isinstance(arg, Tensor) else arg or 0 for arg in args])
    if _keep is None:
        kernel.run(words)
    else:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        _keep(KernelCall(kernel.name, kernel.address, words, tensors))


@contextlib.contextmanager
def keeping(keep: Callable[[KernelCall], None]) -> Iterator[None]:
    """Hand each call of this process to `keep`, which may make it later."""
    global _keep
    before, _keep = _keep, keep
    try:
        yield
    finally:
        _keep = before


def named(call: KernelCall) -> None:
    """Make a call, which a trace names. `keeping` it names the calls that are made at once."""
    with _RecordFunctionFast(f"native::{call.name}"):
        _Run(call.address)(call.words)


class KernelCalls:
    """Calls that are made together. The caller keeps their tensors' memory."""

    def __init__(self, calls: Sequence[KernelCall]):
        self._words = ctypes.create_string_buffer(b"".join(each.words for each in calls))
        address = ctypes.addressof(self._words)
        pairs = []
        for each in calls:
            pairs += [each.address, address]
            address += len(each.words)
        self._pairs = (ctypes.c_uint64 * len(pairs))(*pairs)
        self._run = build.library().atom_run
        self._calls = calls

    def __call__(self) -> None:
        """Make the calls, in order."""
        self._run(self._pairs, len(self._calls))

    def one_by_one(self) -> Iterator[Callable[[], None]]:
        """The calls, in order, each to be made alone, which a trace names."""
        for call in self._calls:
            yield partial(named, call)


@cache
def _kernels(dtype: torch.dtype) -> dict[str, _Kernel]:
    first = ctypes.pointer(_Entry.in_dll(build.library(), f"atom_kernels_{DTYPES[dtype]}"))
    found = dict[str, _Kernel]()
    number = 0
    while (entry := first[number]).name is not None:
        words = struct.Struct(entry.letters.decode().replace("f", "f4x"))
        name = entry.name.decode()
        found[name] = _Kernel(name, entry.run, _Run(entry.run), words)
        number += 1
    return found
