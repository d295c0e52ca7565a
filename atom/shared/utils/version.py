"""ATOM's version."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "atom-serve"


def atom_version() -> str:
    """The installed version; 0+source for a source tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"
