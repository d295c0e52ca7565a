"""Which versions of vLLM the plugin runs in."""

import re

from atom import __version__

OLDEST = (0, 26)
NEWEST = (0, 33)
"""Versions whose interfaces the contract tests read."""


def misfit(host: str) -> str | None:
    """Why the plugin does not run in this version of vLLM, in one line; None if it does."""
    found = re.match(r"(\d+)\.(\d+)", host)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    return (
        f"ATOM {__version__} is a plugin of vLLM {_text(OLDEST)} to {_text(NEWEST)}; vLLM {host} "
        "runs without it: install one of those versions, or set ATOM_DISABLE_VLLM_PLUGIN=1"
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
