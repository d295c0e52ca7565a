"""Steps that take a fixed time, in every Python process with this folder in PYTHONPATH.

The worker computes as ever, but a step's results count as there no sooner than STEADY_STEP_MS after
those of the step before, or STEADY_PROMPT_MS where it brings prompts. So a server of ours runs at a
pace that does not depend on the machine, and what clients report of it can be compared.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "workers.worker"
_STEP_S = float(os.environ["STEADY_STEP_MS"]) / 1e3
_PROMPT_S = float(os.environ["STEADY_PROMPT_MS"]) / 1e3


class _Delayed:
    """A pending step that is ready no earlier than a moment."""

    def __init__(self, pending: Any, moment: float):
        self._pending = pending
        self._moment = moment

    def ready(self) -> bool:
        return time.monotonic() >= self._moment and self._pending.ready()

    def result(self) -> Any:
        return self._pending.result()


def _slow_down(module: ModuleType) -> None:
    execute = module.Worker.execute
    free_at = 0.0

    def steadily(self: Any, batch: Any) -> _Delayed:
        nonlocal free_at
        free_at = max(time.monotonic(), free_at) + (_PROMPT_S if batch.new_rows else _STEP_S)
        return _Delayed(execute(self, batch), free_at)

    module.Worker.execute = steadily


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the worker's module when it is imported, once."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _slow_down(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
