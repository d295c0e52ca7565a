"""Optional libraries that compile or load drivers when imported, so that an import may fail, crash or hang.

They are imported first in a child process: `python -m atom.utils.optional_library` prints a `Library` as
the last line on standard output.
"""

import importlib
import re
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from importlib.util import find_spec

import msgspec

from atom.messages.doctor import Library, LibraryLaunch
from atom.utils.errors import one_line
from atom.utils.process import last_line, read_launch, spawn

AITER = LibraryLaunch("aiter", "amd-aiter", "0.1.7")
MORI = LibraryLaunch("mori", "amd-mori", "1.2")

NOT_INSTALLED = "not installed"
_DEADLINE_S = 300.0
"""AITER's first import compiles a module with hipcc."""


def main() -> None:
    found = describe(read_launch(LibraryLaunch))
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")


def describe(launch: LibraryLaunch) -> Library:
    """Its version, and why it cannot be imported."""
    try:
        version = metadata.version(launch.distribution)
    except metadata.PackageNotFoundError:
        version = ""
    if version and launch.least and release(version) < release(launch.least):
        wanted = f"{launch.distribution}>={launch.least}"
        return Library(version, f"too old: pip install '{wanted}'")
    try:
        module = importlib.import_module(launch.module)
    except ModuleNotFoundError as error:
        missing = error.name == launch.module
        return Library(version, NOT_INSTALLED if missing else one_line(error))
    except BaseException as error:  # libraries also call sys.exit
        return Library(version, one_line(error))
    return Library(version or str(getattr(module, "__version__", "")))


def release(version: str) -> tuple[int, ...]:
    """Leading numbers, so that 2.11.0+cu130 is at least 2.11."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def problem(launch: LibraryLaunch) -> str | None:
    """Why the library cannot be used, and what to do; None if it can be used, or is not installed at all.

    Tried once in a process, in a child that may take minutes.
    """
    return _problem(launch) if find_spec(launch.module) is not None else None


@cache
def _problem(launch: LibraryLaunch) -> str | None:
    if launch.module in sys.modules:
        return None
    child = spawn("atom.utils.optional_library", launch, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        found = msgspec.json.decode(last_line(child, time.monotonic() + _DEADLINE_S), type=Library)
    except TimeoutError:
        found = Library(error=f"the import did not end within {_DEADLINE_S:.0f} s")
    except msgspec.DecodeError:
        found = Library(error=f"the import ended its process with status {child.returncode}")
    if not found.error:
        return None
    name = f"{launch.distribution} {found.version}".strip()
    if found.error.startswith("too old"):
        return f"{name} is {found.error}"
    return (
        f"{name} cannot be imported ({found.error}): it needs the ROCm that it was built for, hipcc in PATH "
        "and a GPU that it supports; repair or uninstall it"
    )


if __name__ == "__main__":
    main()
