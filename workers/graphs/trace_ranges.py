"""Named ranges in traces, as NVTX ranges are: the module and the captured graph of each kernel.

in a step      MODULE                             path in the model, such as model.layers.3.mlp
               replay_graph_NAME                  launch of a captured graph
in a capture   capture_graph_NAME > … > MODULE    modules of that graph's kernels

A replay on a CPU makes the ranges of its modules itself: there the capture is not needed.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from workers.graphs.graph_recorder import Recorder, Replay

_ENTRIES = ("forward", "after_norm", "after_gate", "add_norm", "select_experts", "sample")
"""Methods that launch kernels: fused layers call others than `forward`."""
_running: list[str] = []
"""Marked modules whose methods run in this process, innermost last."""


def add_module_ranges(model: nn.Module) -> None:
    """Record the name of each module around its calls."""
    for path, module in model.named_modules():
        for entry in _ENTRIES:
            method = getattr(module, entry, None)
            if path and method is not None and getattr(type(module), entry) is not nn.Module.forward:
                setattr(module, entry, _within(module_range, path, method))


@contextlib.contextmanager
def module_range(path: str) -> Iterator[None]:
    """Record what runs within as this module's; an empty path records nothing."""
    if not path:
        yield
        return
    _running.append(path)
    try:
        with record_function(path):
            yield
    finally:
        _running.pop()


def current_module() -> str:
    """The innermost marked module that runs; empty without one."""
    return _running[-1] if _running else ""


class RangeRecorder:
    """Wraps a recorder; its captures and replays are named in traces."""

    def __init__(self, record: Recorder):
        self._record = record
        self.runs_first = record.runs_first

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        replay, result = self._record(_within(record_function, f"capture_graph_{name}", body), name)
        return _within(record_function, f"replay_graph_{name}", replay), result


def _within(
    make_range: Callable[[str], AbstractContextManager[object]], name: str, compute: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(compute)
    def named(*args: Any, **kwargs: Any) -> Any:
        with make_range(name):
            return compute(*args, **kwargs)

    return named
