"""Finds our packages next to `atom`, whatever else on the path has their names.

Their names are common ones: a program may be started in a directory that has a `frontend` of its own, and
Python looks there first.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["check_own_packages", "find_own_packages"]

_NAMES = ("frontend", "engine_core", "workers", "parallel", "atom_ops")
_ROOT = Path(__file__).resolve().parents[3]


class _OwnPackages(MetaPathFinder):
    """The specs of our packages, and of nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in _NAMES:
            return None
        return PathFinder.find_spec(fullname, [str(_ROOT)])


def find_own_packages() -> None:
    """From now on our packages are found first. Later calls do nothing."""
    if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages())


def check_own_packages() -> None:
    """Raise ImportError, in one line, if another package has been imported under a name of ours."""
    for name in _NAMES:
        module = sys.modules.get(name)
        if module is None:
            continue
        places = [Path(place).resolve() for place in getattr(module, "__path__", ())]
        if places != [_ROOT / name]:
            where = places[0] if places else getattr(module, "__file__", None) or "this program"
            raise ImportError(
                f"the name {name!r} is taken: {where} was imported before atom, which has a package of that "
                "name; rename it, or use the server (atom-launch) instead of the library"
            )
