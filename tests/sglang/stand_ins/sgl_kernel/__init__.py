"""Stands in for SGLang's native package, whose wheel is for GPUs: names are found, and calls raise.

SGLang imports it at start, also where a CPU runs torch's functions instead.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class Missing:
    """A function, or a namespace of functions, that is not there."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError(f"{self.__name__} is SGLang's native code, which is not installed here")


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{__package__}.{name}")


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = fullname.startswith(f"{__package__}.")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = Missing(spec.name).__getattr__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Submodules())
