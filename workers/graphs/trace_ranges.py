"""Named ranges in traces, as NVTX ranges are: the module and the captured graph of each kernel.

in a step      MODULE                             path in the model, such as model.layers.3.mlp
               replay_graph_NAME                  launch of a captured graph
in a capture   capture_graph_NAME > … > MODULE    modules of that graph's kernels
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from workers.graphs.graph_recorder import Recorder, Replay

_ENTRIES = ("forward", "after_norm", "after_gate", "add", "select_experts", "sample")
"""Methods that launch kernels: fused layers call others than `forward`."""


def add_module_ranges(model: nn.Module) -> None:
    """Record the name of each module around its calls."""
    for path, module in model.named_modules():
        for entry in _ENTRIES:
            method = getattr(module, entry, None)
            if path and method is not None and getattr(type(module), entry) is not nn.Module.forward:
                setattr(module, entry, _named(path, method))


class RangeRecorder:
    """Wraps a recorder; its captures and replays are named in traces."""

    def __init__(self, record: Recorder):
        self._record = record
        self.runs_first = record.runs_first

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        replay, result = self._record(_named(f"capture_graph_{name}", body), name)
        return _named(f"replay_graph_{name}", replay), result


def _named(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return compute(*args, **kwargs)

    return named
