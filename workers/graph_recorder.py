"""CUDA graph capture."""

from collections.abc import Callable
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

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        body()  # compiles kernels and initialises libraries outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph.replay, result
