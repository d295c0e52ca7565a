"""Stands in for torchvision, whose wheel does not fit torch's build for CPUs: modules and names are found."""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.0"


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


def _add(name: str) -> None:
    module = _Module(f"{__name__}.{name}")
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _add(_name)
for _name in ("ops", "ops.boxes"):
    _add(_name)
