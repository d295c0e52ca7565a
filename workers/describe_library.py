"""`python -m workers.describe_library`: imports an optional library, which may hang or crash.

Prints a `Library` as the last line on standard output.
"""

import importlib
import sys
from importlib import metadata

import msgspec

from atom.messages.doctor import Library, LibraryLaunch
from atom.utils.errors import one_line
from atom.utils.process import read_launch


def main() -> None:
    found = describe(read_launch(LibraryLaunch))
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")


def describe(launch: LibraryLaunch) -> Library:
    """Its version, and why it cannot be imported."""
    try:
        version = metadata.version(launch.distribution)
    except metadata.PackageNotFoundError:
        version = ""
    try:
        module = importlib.import_module(launch.module)
    except ModuleNotFoundError as error:
        missing = error.name == launch.module
        return Library(version, "not installed" if missing else one_line(error))
    except BaseException as error:  # libraries also call sys.exit
        return Library(version, one_line(error))
    return Library(version or str(getattr(module, "__version__", "")))


if __name__ == "__main__":
    main()
