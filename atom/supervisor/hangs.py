"""What is kept of processes that hang, before they are killed: the stacks of their threads, in one file."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from atom.shared.utils.kept_files import new_kept_file
from atom.shared.utils.logger import get_logger
from atom.shared.utils.stack_dump import DUMP_SIGNAL, STACKS_SUFFIX
from atom.supervisor.child import Child

__all__ = ["ask_for_stacks", "save_stacks"]

_WAIT_S = 2.0
"""Longest time for all processes together to write their stacks."""
_SETTLED_S = 0.2
_POLL_S = 0.02
_MAX_BYTES = 1 << 20
"""Most bytes of one process."""


def ask_for_stacks(children: Iterable[Child], directory: Path) -> None:
    """Make the children of a life write their stacks to files in `directory`, and wait until they have."""
    running = [child for child in children if child.is_alive]
    for child in running:
        child.process.send_signal(DUMP_SIGNAL)
    deadline = time.monotonic() + _WAIT_S
    sizes: list[int] = []
    settled_at = time.monotonic() + _SETTLED_S
    while (now := time.monotonic()) < deadline:
        before = sizes
        sizes = [_size(directory / f"{child.name}{STACKS_SUFFIX}") for child in running]
        if sizes != before:
            settled_at = now + _SETTLED_S
        missing = [child for child, size in zip(running, sizes, strict=True) if not size]
        # Stopped processes do not write until they go on; those of other nodes, without a state, do so there.
        if now >= settled_at and all(_state(child)[:1] in ("", "T") for child in missing):
            return
        time.sleep(_POLL_S)


def save_stacks(directory: Path, title: str, children: Iterable[Child]) -> None:
    """Join what the children of a life have written to `directory` in one file that stays, and log its path.

    Without any stacks nothing is written. `title` is the first line.
    """
    written = {path.stem: path for path in sorted(directory.glob(f"*{STACKS_SUFFIX}")) if _size(path)}
    if not written:
        return
    processes = {child.name: child for child in children}
    parts = [title]
    for name in dict.fromkeys([*written, *processes]):
        state = _state(processes[name]) if name in processes else ""
        parts.append(f"\n=== {name}, {state or 'no process of this host any more'}")
        parts.append(_text(written[name]) if name in written else "it has written no stacks")
    try:
        target = new_kept_file("hangs", directory.name, ".txt")
        target.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        get_logger().error("the stacks of processes that hang cannot be written: %s", error)
        return
    get_logger().error("the stacks of all its processes are in %s", target)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace").rstrip()


def _state(child: Child) -> str:
    """What the kernel says of a process of this host, such as "T (stopped)"; empty if it has ended."""
    pid = child.process.pid
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if pid and line.startswith("State:"):
                return line.removeprefix("State:").strip()
    return ""
