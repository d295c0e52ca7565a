"""Guards against other distributions that install packages named like ours.

Our packages have common names, and pip lets one distribution overwrite another's files silently.
This module imports no other module of ours, since a foreign package could break such an import.
"""

import re
from importlib.metadata import Distribution, distributions

DISTRIBUTION = "atom-serve"
PACKAGES = ("atom", "frontend", "engine_core", "workers", "parallel", "atom_ops")

_OURS_IN_RECORD = re.compile(rf"^({'|'.join(PACKAGES)})/", re.MULTILINE)


def check_install() -> None:
    """Raise SystemExit with one line when another distribution owns one of our names.

    A source tree that is not installed passes.
    """
    for distribution in distributions():
        owned = _owned(distribution)
        name = distribution.name
        if owned and re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION:
            raise SystemExit(
                f"error: {name} installs a package {min(owned)!r}, as {DISTRIBUTION} does: uninstall "
                f"it and reinstall {DISTRIBUTION}, best in a virtual environment of its own"
            )


def _owned(distribution: Distribution) -> set[str]:
    """The names of ours that a distribution installs.

    importlib.metadata.packages_distributions gives the same, but parses every path of every
    distribution: ten times slower with torch installed.
    """
    top_level = distribution.read_text("top_level.txt")
    if top_level is not None:
        return set(PACKAGES) & set(top_level.split())
    return set(_OURS_IN_RECORD.findall(distribution.read_text("RECORD") or ""))
