"""Which versions of a host a plugin runs in."""

import re
from dataclasses import dataclass

from atom import __version__


@dataclass(frozen=True)
class HostVersions:
    """The versions whose interfaces the contract tests read."""

    host: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    """As many numbers as `oldest`; later numbers of a version do not matter."""
    switch: str
    """The environment variable that disables the plugin."""

    def misfit(self, found: str) -> str | None:
        """Why the plugin does not run in this version, in one line; None if it does."""
        numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[a-z+]", found)[0])))[: len(self.oldest)]
        if len(numbers) == len(self.oldest) and self.oldest <= numbers <= self.newest:
            return None
        span = " to ".join(dict.fromkeys(".".join(map(str, each)) for each in (self.oldest, self.newest)))
        return (
            f"ATOM {__version__} is a plugin of {self.host} {span}; {self.host} {found} "
            f"runs without it: install one of those versions, or set {self.switch}=1"
        )
