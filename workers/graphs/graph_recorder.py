"""CUDA graph capture."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import get_logger
from atom_ops import backend

Replay = Callable[[], object]


class Recorder(Protocol):
    """Captures a function; returns its replay and its result, which every replay overwrites.

    `name` names the graph in traces.
    """

    runs_first: bool
    """Whether a function may run before its capture: what it reads must have been computed then."""

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]: ...


class GraphRecorder:
    """Captures on the current GPU; all graphs share one memory pool.

    Replays must not overlap. A replay may overwrite what other graphs computed, except for results
    that are still referenced. Nothing else may run on the device during a capture.
    """

    runs_first = True

    def __init__(self, runs_always: bool = True) -> None:
        """`runs_always`: each function runs before its capture; else the first, and those with new kernels.

        Ranks that wait for one another in a function must agree on that.
        """
        self._runs_always = runs_always
        self._has_run = False
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        captured = self._without_run(body) if self._has_run and not self._runs_always else None
        if captured is not None:
            return captured
        body()  # compiles kernels and initialises libraries outside the capture
        self._has_run = True
        return self._capture(body)

    def _without_run(self, body: Callable[[], Any]) -> tuple[Replay, Any] | None:
        """None if `body` must run first: it needs a kernel, or a library, that a capture cannot load."""
        try:
            return backend.with_loaded_kernels(partial(self._capture, body))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            get_logger().debug("a step runs before its capture: %s", one_line(error))
            return None

    def _capture(self, body: Callable[[], Any]) -> tuple[Replay, Any]:
        with self.capturing():
            self.begin()
            result = body()
            return self.end(), result

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Work is launched on the stream of captures; one that an error interrupts is abandoned.

        Raises torch.OutOfMemoryError also where the driver lacks memory for a graph.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException as error:
                self._abandon()
                if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                    raise torch.OutOfMemoryError(str(error)) from None
                raise
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Begin a capture; within `capturing`."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End the capture that was begun last; its replay."""
        graph = self._graph
        assert graph is not None, "begin comes first"
        self._graph = None
        graph.capture_end()
        return graph.replay

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same GPU memory that does not keep it: the pool of the graphs does."""
        if not tensor.numel():
            return tensor
        memory = _Memory(tensor.data_ptr(), used_bytes(tensor))
        return placed(torch.as_tensor(memory, device=tensor.device), tensor)

    def _abandon(self) -> None:
        if self._graph is None:
            return
        graph, self._graph = self._graph, None
        # Errors and warnings say no more than the error that interrupted the capture.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph.capture_end()
            except RuntimeError:
                # An invalid capture ends without this, and the pool would refuse the next one.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def used_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last value of a tensor, which has some."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def placed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor like another one in `memory`, its `used_bytes`."""
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


class _Memory:
    """Bytes of GPU memory, for torch."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
