"""Where Python keeps what it compiled, if the installation has none.

A large library has thousands of files. An image whose packages were installed without bytecode, and in which
Python cannot or must not write any, compiles them in every process: some seconds each.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from atom.shared.utils import envs
from atom.shared.utils.trusted_path import distrusted

__all__ = ["bytecode_variables"]

_PREFIX, _NEVER = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def bytecode_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a child process that has to keep bytecode in ATOM_CACHE_DIR; empty for others.

    Nothing changes for a user who chose a place, whose torch has bytecode or gets it, or whose cache others
    could write.
    """
    source = _source_of_torch()
    if source is None or environment.get(_PREFIX) or Path(importlib.util.cache_from_source(source)).exists():
        return {}
    if not environment.get(_NEVER) and os.access(Path(source).parent, os.W_OK):
        return {}
    directory = Path(envs.ATOM_CACHE_DIR) / "bytecode"
    return {} if distrusted(directory) else {_PREFIX: str(directory), _NEVER: ""}


def _source_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    return None if spec is None else spec.origin
