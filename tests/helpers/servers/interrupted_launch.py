"""`atom-launch` that gets SIGTERM at a certain instruction of its start, for tests of that.

    python -m tests.helpers.servers.interrupted_launch CALL NUMBER [FLAG]...

sends it to itself as soon as the NUMBER-th call of CALL, one of `CALLS`, has returned; its caller has not got
the result yet.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import zmq

from atom.launch import main

CALLS: dict[str, tuple[Any, str]] = {
    "socket": (zmq.Socket, "__init__"),
    "process": (subprocess.Popen, "__init__"),
    "directory": (tempfile, "mkdtemp"),
}


def interrupt(owner: Any, name: str, number: int, signal_number: int) -> None:
    """Make the NUMBER-th call of `owner.name` send this process a signal."""
    call: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = call(*args, **kwargs)
        calls += 1
        if calls == number:
            signal.raise_signal(signal_number)  # to this thread, and no other
        return result

    setattr(owner, name, interrupted)


if __name__ == "__main__":
    interrupt(*CALLS[sys.argv[1]], int(sys.argv[2]), signal.SIGTERM)
    del sys.argv[1:3]
    main()
