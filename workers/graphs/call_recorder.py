"""Recordings of steps on a CPU, in place of GPU graphs: calls made again, without the Python of the model.

    body() ──▶ kernel, kernel, operator, kernel, …     recorded
    replay ──▶ [kernels] operator [kernels] …          each [kernels] is one call from Python

A small model's decode step takes as long in Python as in its kernels. As a GPU graph does, a replay reads and
writes the memory of its recording. torch's operators are called again and their results copied there; those
whose results depend on values cannot be recorded, nor can a body that reads values itself.

While torch's profiler runs, a replay makes the calls one by one, each in the range of its module.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from atom_ops import NoHostRowsError
from atom_ops.native_impl.calls import KernelCall, KernelCalls, keeping
from workers.graphs.graph_recorder import Replay, placed, used_bytes
from workers.graphs.trace_ranges import current_module, module_range

_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_READS = ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__")
"""Methods by which Python gets the values of a tensor."""


class NotRecordableError(Exception):
    """What a function does cannot be done again from a recording; says why."""


class CallRecorder:
    """Records on this CPU; all recordings share memory. Replays must not overlap.

    A replay may overwrite what other recordings computed, except for results that are still referenced.
    Recording runs operators, but no kernel: what these compute has no values yet. Raises NotRecordableError.
    """

    runs_first = False

    def __init__(self) -> None:
        self._memory = _Memory()
        self._modes = contextlib.ExitStack()
        self._recording: _Recording | None = None

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        with self.capturing():
            self.begin()
            result = body()
            return self.end(), result

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Recordings are begun and ended within; one that an error interrupts is abandoned."""
        try:
            with self._modes:
                yield
        except NoHostRowsError as error:
            raise NotRecordableError(str(error)) from error

    def begin(self) -> None:
        """Begin a recording."""
        self._recording = _Recording(self._memory)
        for mode in (keeping(self._recording.add_kernel), _NoReads(), self._recording):
            self._modes.enter_context(mode)

    def end(self) -> Replay:
        """End the recording that was begun last; its replay."""
        assert self._recording is not None, "begin comes first"
        self._modes.close()
        return self._recording.replay()

    def borrow(self, tensor: Tensor) -> Tensor:
        """A tensor of the same memory that does not keep it in use."""
        borrowed: Tensor = self._memory.alias(tensor)
        return borrowed


class _Block:
    """Memory of one tensor at a time."""

    def __init__(self, size: int) -> None:
        memory = torch.empty(size, dtype=torch.uint8)
        self.address = memory.data_ptr()
        self.size = size
        self._bytes: NDArray[np.uint8] = memory.numpy()
        self._user: weakref.ref[NDArray[np.uint8]] | None = None
        """Lives as long as the storage that was made of it."""

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def take(self, tensor: Tensor, size: int) -> Tensor:
        """A tensor like this one, of so many bytes, which keeps the block in use."""
        user = self._bytes[:size]
        self._user = weakref.ref(user)
        return placed(torch.from_numpy(user), tensor)

    def alias(self, tensor: Tensor) -> Tensor:
        """The same tensor, which does not keep the block in use."""
        start = tensor.data_ptr() - self.address
        return placed(torch.from_numpy(self._bytes[start : start + _used(tensor)]), tensor)


def _used(tensor: Tensor) -> int:
    return used_bytes(tensor) if tensor.numel() else tensor.element_size()


class _Memory:
    """Memory of the tensors that bodies allocate; used again once no tensor uses it."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor like this one, which has no values yet, in this memory."""
        size = _used(tensor)
        large = [block for block in self._blocks if block.size >= size and block.is_free]
        if not large:
            large = [_Block(size)]
            self._blocks += large
        return min(large, key=lambda block: block.size).take(tensor, size)

    def alias(self, value: Any) -> Any:
        """The same value for calls to come: a tensor in this memory does not keep it in use."""
        block = self.block_of(value) if _has_memory(value) else None
        return value if block is None else block.alias(value)

    def block_of(self, tensor: Tensor) -> _Block | None:
        """The block that the tensor is in."""
        address = tensor.data_ptr()
        return next((each for each in self._blocks if 0 <= address - each.address < each.size), None)


class _NoReads(TorchFunctionMode):
    """Refuses to give values to Python, which would be those of the recording in every replay."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise NotRecordableError(f"the model reads values of each step in Python (Tensor.{name})")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """The calls of one body."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory
        self._parts: list[list[KernelCall] | Replay] = []
        self._modules: list[str] = []
        """The module of each call, in order."""
        self._kept: list[Tensor] = []

    def add_kernel(self, call: KernelCall) -> None:
        self._kept += [each for each in call.tensors if self._memory.block_of(each) is None]
        self._modules.append(current_module())
        call = replace(call, tensors=())
        if self._parts and isinstance(self._parts[-1], list):
            self._parts[-1].append(call)
        else:
            self._parts.append([call])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise NotRecordableError(f"the shape or the value of {func} depends on values")
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and not _has_memory(leaf) for leaf in tree_leaves(result)):
            raise NotRecordableError(f"the result of {func} has no address")
        if func in _ALLOCATIONS:
            return self._memory.placed(result)
        if func._schema.is_mutable or not _are_views(result, (args, kwargs)):
            self._modules.append(current_module())
            self._parts.append(_again(func, *tree_map(self._memory.alias, (args, kwargs, result))))
        return result

    def replay(self) -> Replay:
        """Makes the calls again."""
        parts = [KernelCalls(part) if isinstance(part, list) else part for part in self._parts]
        return _Replay(parts, self._modules, self._kept)


@dataclass(frozen=True, slots=True)
class _Replay:
    parts: Sequence[KernelCalls | Replay]
    modules: Sequence[str]
    """The module of each call; a part of kernels has several calls."""
    kept: Sequence[Tensor]
    """Tensors outside the recorder's memory that kernels read or write."""

    def __call__(self) -> None:
        if torch.autograd._profiler_enabled():
            self._run_in_ranges()
            return
        for part in self.parts:
            part()

    def _run_in_ranges(self) -> None:
        """Make the same calls, so that a trace shows each of them within its module."""
        for module, calls in groupby(zip(self.modules, self._calls(), strict=True), key=itemgetter(0)):
            with module_range(module):
                for _, call in calls:
                    call()

    def _calls(self) -> Iterator[Replay]:
        for part in self.parts:
            if isinstance(part, KernelCalls):
                yield from part.one_by_one()
            else:
                yield part


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_):
        return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def _again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Replay:
    """Calls the operator and copies its results to where those of the recording are."""
    if _are_views(result, (args, kwargs)):
        return partial(func, *args, **kwargs)
    if isinstance(result, Tensor):
        return lambda: result.copy_(func(*args, **kwargs))
    before = _tensors(result)

    def again() -> None:
        for old, new in zip(before, _tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return again


def _are_views(result: Any, args: Any) -> bool:
    """Whether the results are memory of the arguments."""
    storages = {each.untyped_storage().data_ptr() for each in _tensors(args)}
    return all(each.untyped_storage().data_ptr() in storages for each in _tensors(result))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if _has_memory(leaf)]


def _has_memory(value: Any) -> bool:
    """Whether it is a tensor, and its values are at an address: not in a layout of oneDNN's."""
    return isinstance(value, Tensor) and value.layout is torch.strided
