"""A graph recorder for a CPU: records torch's operators, and replays them into the same tensors.

As a GPU graph it reads and writes the memory of its capture and runs no Python of the model. Operators
whose result has another shape at each call cannot be recorded.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.graph_recorder import Replay


class OpRecorder:
    """In place of `GraphRecorder`; counts the operators that each capture replays."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._mode: _Recording | None = None

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        body()
        with self.capturing():
            self.begin()
            result = body()
            return self.end(), result

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._mode = _Recording()
        self._mode.__enter__()

    def end(self) -> Replay:
        assert self._mode is not None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.sizes.append(len(mode.calls))
        return mode.replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
