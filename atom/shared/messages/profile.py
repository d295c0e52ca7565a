"""Messages about profiling, which travel from a frontend through the core to every worker and back.

frontend -> Profile -> core -> Profile -> workers, RankTrace -> core, ProfileResult -> frontend
"""

import msgspec


class Profile(msgspec.Struct, tag=8, array_like=True, frozen=True, gc=False):
    """Start recording traces on all workers, or stop and write them to files."""

    on: bool
    number: int = 0
    """Chosen by the frontend; the result repeats it."""


class RankTrace(msgspec.Struct, tag=18, array_like=True, frozen=True, gc=False):
    """One rank has carried out a `Profile`: it records, or its trace is written."""

    rank: int
    on: bool
    directory: str = ""
    file: str = ""
    """Name of the trace in `directory`; empty after a start, and where nothing was recorded."""
    steps: int = 0
    elapsed_s: float = 0.0
    """From the start of the recording to its stop."""
    error: str = ""
    """Why it failed, in one line."""


class ProfileResult(msgspec.Struct, tag=19, array_like=True, frozen=True, gc=False):
    """The result of a frontend's `Profile`, on all ranks."""

    number: int
    on: bool
    traces: list[RankTrace] = []
    """Traces in the order of the ranks."""
    refusal: str = ""
    """Why the request was refused; nothing was done."""
    error: str = ""
    """Why one of the ranks failed."""
