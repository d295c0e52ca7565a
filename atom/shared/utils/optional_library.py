"""Optional libraries that compile or load drivers when imported, so that an import may fail, crash or hang.

They are imported first in a child process: `python -m atom.shared.utils.optional_library` prints a
`Library` as the last line on standard output.
"""

import contextlib
import importlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from atom.shared.messages.doctor import Library, LibraryLaunch
from atom.shared.utils import envs
from atom.shared.utils.errors import one_line
from atom.shared.utils.file_lock import exclusive
from atom.shared.utils.logger import get_logger
from atom.shared.utils.process import last_line, read_launch, spawn

AITER = LibraryLaunch("aiter", "amd-aiter", "0.1.7")
MORI = LibraryLaunch("mori", "amd-mori", "1.2.4")
"""Earlier ones launch on another stream while a graph is captured."""

NOT_INSTALLED = "not installed"
_TOO_OLD = "too old"
DEADLINE_S = 300.0
"""AITER's first import compiles a module with hipcc; an import that is ended earlier leaves its lock."""


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
        return Library(version, f"{_TOO_OLD}: pip install '{wanted}'")
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


_KNOWN: dict[LibraryLaunch, str | None] = {}
"""The result of `problem`, tried once in a process."""


def problem(launch: LibraryLaunch) -> str | None:
    """Why the library cannot be used, and what to do; None if it can be used, or is not installed at all.

    The first call may take minutes.
    """
    if find_spec(launch.module) is None or launch.module in sys.modules:
        return None
    if launch not in _KNOWN:
        remember(launch, _tried(launch))
    return _KNOWN[launch]


def remember(launch: LibraryLaunch, found: Library) -> None:
    """Have `problem` return this result, of an import in another process."""
    _KNOWN[launch] = explained(launch, found)


def explained(launch: LibraryLaunch, found: Library) -> str | None:
    """Why a library that was found so cannot be used, and what to do; None if it can be."""
    if not found.error:
        return None
    name = f"{launch.distribution} {found.version}".strip()
    if found.error.startswith(_TOO_OLD):
        return f"{name} is {found.error}"
    return (
        f"{name} cannot be imported ({found.error}): it needs the ROCm that it was built for, hipcc in "
        "PATH and a GPU that it supports; repair or uninstall it"
    )


def _tried(launch: LibraryLaunch) -> Library:
    """What a child finds; on this host one at a time, since the ranks' imports would write the same files."""
    try:
        with _one_at_a_time(launch.module):
            child = spawn(
                "atom.shared.utils.optional_library",
                launch,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            return msgspec.json.decode(last_line(child, time.monotonic() + DEADLINE_S), type=Library)
    except TimeoutError:
        stale = "a lock_* file that a killed build left behind makes it wait for ever"
        return Library(error=f"the import did not end within {DEADLINE_S:.0f} s; {stale}")
    except msgspec.DecodeError:
        return Library(error=f"the import ended its process with status {child.returncode}")


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Raises TimeoutError where others take too long; locks nothing without a directory to write to."""
    with contextlib.ExitStack() as held:
        try:
            directory = Path(envs.ATOM_CACHE_DIR)
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(directory / f"import-{name}.lock", DEADLINE_S, lambda: None))
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:  # no directory to write to, or no home
            get_logger().debug("%s is imported without a lock: %s", name, error)
        yield


if __name__ == "__main__":
    main()
