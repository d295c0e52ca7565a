"""Messages to a service manager that started this process with `Type=notify`, as systemd does.

The manager names a datagram socket in NOTIFY_SOCKET, and with `WatchdogSec=` its timeout in WATCHDOG_USEC
(sd_notify(3)). Without NOTIFY_SOCKET nothing is sent. A message that cannot be sent is dropped: the manager
has timeouts of its own, and a server must not wait for it.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

__all__ = ["ServiceManager"]

# A start or stop must report again within this time; each report is sent this often at most.
_EXTENSION_S = 60.0
_REPORT_INTERVAL_S = 5.0
# The part of the watchdog's timeout that may pass between two messages.
_WATCHDOG_SHARE = 0.5


class ServiceManager:
    """One connection for the life of the process."""

    def __init__(
        self,
        environment: MutableMapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Removes the variables, so that no child process inherits them.

        Raises ValueError for a NOTIFY_SOCKET or WATCHDOG_USEC that is none.
        """
        environment = os.environ if environment is None else environment
        self._clock = clock
        self._next_watchdog = self._next_report = 0.0
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC")
        self.environment = {name: environment[name] for name in names if name in environment}
        """For a process that is to be the service's main one after `replaced_by`."""
        self._address = _address(environment.pop("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environment) if self._address else 0.0
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def starting(self, what: str) -> None:
        """The start makes progress: the manager's timeout for it is extended."""
        self._report(f"EXTEND_TIMEOUT_USEC={_microseconds(_EXTENSION_S)}", f"STATUS=starting: {what}")

    def ready(self, status: str) -> None:
        """Report that the service is up, with a line on its status."""
        self._send("READY=1", f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog, if it is time to."""
        now = self._clock()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + min(self._watchdog_s * _WATCHDOG_SHARE, _REPORT_INTERVAL_S)
            self._send("WATCHDOG=1")

    def stopping(self, at_most_s: float) -> None:
        """Report that the service ends, which takes at most so many seconds."""
        extension = f"EXTEND_TIMEOUT_USEC={_microseconds(at_most_s)}"
        self._send("STOPPING=1", extension, "STATUS=running requests may finish")

    def replaced_by(self, pid: int) -> None:
        """Make another process the main one of the service: only its messages count from now on."""
        self._send(f"MAINPID={pid}")
        self.close()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _report(self, *lines: str) -> None:
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + _REPORT_INTERVAL_S
            self._send(*lines)

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            message = "\n".join(line.replace("\n", " ") for line in lines)
            with contextlib.suppress(OSError):
                self._socket.sendto(message.encode(), self._address)


def _address(name: str) -> str:
    """The address of an AF_UNIX socket; `@` begins the name of an abstract one."""
    if name and name[0] not in "/@":
        raise ValueError(f"NOTIFY_SOCKET={name!r} is no path and no abstract socket: unset it")
    return f"\0{name[1:]}" if name.startswith("@") else name


def _watchdog_s(environment: MutableMapping[str, str]) -> float:
    """The watchdog's timeout; 0 when there is none, or when it is another process's."""
    text = environment.pop("WATCHDOG_USEC", "")
    process = environment.pop("WATCHDOG_PID", "")
    if not text or process not in ("", str(os.getpid())):
        return 0.0
    if not text.isdecimal():
        raise ValueError(f"WATCHDOG_USEC={text!r} is not a number of microseconds: unset it")
    return int(text) / 1e6


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
