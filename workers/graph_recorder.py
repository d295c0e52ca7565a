"""CUDA graph capture."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

Replay = Callable[[], object]


class Recorder(Protocol):
    """Captures a function; returns its replay and its result, which every replay overwrites.

    `name` names the graph in traces.
    """

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]: ...


class GraphRecorder:
    """Captures on the current GPU; all graphs share one memory pool.

    Replays must not overlap. A replay may overwrite what other graphs computed, except for results
    that are still referenced. Nothing else may run on the device during a capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        body()  # compiles kernels and initialises libraries outside the capture
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

    def _abandon(self) -> None:
        if self._graph is not None:
            with contextlib.suppress(RuntimeError):  # it says no more than the error that interrupted it
                self._graph.capture_end()
            self._graph = None
