"""Captures what the device runs, to run it again without the host."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Replay = Callable[[], object]


class Recorder(Protocol):
    """Runs a function and returns what runs it again, on the same memory, and its first result.

    `name` tells the captured functions of one engine apart, in traces.
    """

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]: ...


class GraphRecorder:
    """Captures on the current GPU; all its graphs share one pool of memory.

    So they are replayed one at a time, in any order, and nothing that a graph leaves outlives the
    next one's replay unless it is a result that somebody still holds. Nothing else may run on the
    device while it captures.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        body()  # compiles the kernels, and lets libraries set themselves up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph.replay, result
