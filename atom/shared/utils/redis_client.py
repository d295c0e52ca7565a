"""One connection to a Redis or Valkey server, with a deadline for every exchange.

    redis://[USER@]HOST[:PORT][/DATABASE]        rediss:// with TLS

hiredis encodes commands and decodes replies. Here are the socket and its deadline: a server that stops in the
middle of a reply, or sends it byte by byte, costs no more than one that is gone.
"""

import re
import select
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from atom.shared.utils import envs
from atom.shared.utils.errors import one_line

__all__ = [
    "KEY_PREFIX",
    "Command",
    "RedisAddress",
    "RedisClient",
    "RedisError",
    "agreed_seed",
    "hiredis_problem",
    "parse_redis_url",
]

Command = tuple[str | bytes | memoryview, ...]
Reply = bytes | int | Exception | None

_PORT = 6379
_CONNECT_S = 2.0
_SEED_S = 2.0
KEY_PREFIX = "atom-kv:"
_SEED_KEY = f"{KEY_PREFIX}seed"
_RECEIVED_BYTES = 1 << 20
_REPLY_BYTES = 256
"""What the reply to one command may take besides the values that are asked for."""


class RedisError(Exception):
    """The server cannot be used now; the text is one line."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """What a URL says."""

    host: str
    port: int
    database: int
    user: str
    is_tls: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ValueError for a URL of another form; the text says what is expected."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise ValueError("others can read the password in it: set ATOM_KV_OFFLOAD_REMOTE_PASSWORD instead")
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(f"{url!r} does not begin with redis:// or rediss://")
    database = parts.path.removeprefix("/")
    try:
        port = parts.port or _PORT
    except ValueError:
        raise ValueError(f"{url!r} has a port that is no number from 1 to 65535") from None
    if not parts.hostname or parts.query or parts.fragment or (database and not database.isdecimal()):
        raise ValueError(f"{url!r} is not of the form redis://HOST:PORT/DATABASE")
    is_tls = parts.scheme == "rediss"
    return RedisAddress(parts.hostname, port, int(database or 0), parts.username or "", is_tls)


def hiredis_problem() -> str:
    """What to do about a library that is not installed, or nothing."""
    return "" if find_spec("hiredis") else "hiredis is not installed: pip install 'atom-serve[redis]'"


class RedisClient:
    """Open it before an exchange: it closes after an error. For one thread."""

    def __init__(self, url: str):
        """The password is in ATOM_KV_OFFLOAD_REMOTE_PASSWORD."""
        self._address = parse_redis_url(url)
        self._password = envs.ATOM_KV_OFFLOAD_REMOTE_PASSWORD
        self._socket: socket.socket | None = None

    def __str__(self) -> str:
        return str(self._address)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, and the server has not closed it for being idle."""
        if self._socket is None:
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)  # nothing was asked for: what can be read is the end

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def open(self) -> None:
        """Connect, log in and select the database. Raises RedisError."""
        import hiredis

        self.close()
        address = self._address
        deadline = time.monotonic() + _CONNECT_S
        try:
            self._socket = socket.create_connection((address.host, address.port), _CONNECT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.is_tls:
                context = ssl.create_default_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
        except OSError as error:
            self.close()
            raise RedisError(f"{address} cannot be reached: {one_line(error, OSError)}") from None
        self._reader = hiredis.Reader()
        commands: list[Command] = []
        if self._password:
            login = (address.user, self._password) if address.user else (self._password,)
            commands.append(("AUTH", *login))
        commands.append(("SELECT", str(address.database)))
        for reply in self._exchange(commands, 0, deadline):
            if isinstance(reply, Exception):
                raise RedisError(f"{address} refused the login: {one_line(reply, type(reply))}")

    def exchange(self, commands: Sequence[Command], value_bytes: int, timeout_s: float) -> Iterator[Reply]:
        """Send commands at once; yields the reply to each, which is an exception if the server refused it.

        `value_bytes`: most bytes of the values in all replies. Raises RedisError after `timeout_s`, for a
        longer reply, and for a connection that ended; it is closed then, as it is unless all are read.
        """
        return self._exchange(commands, value_bytes, time.monotonic() + timeout_s)

    def _exchange(self, commands: Sequence[Command], value_bytes: int, deadline: float) -> Iterator[Reply]:
        import hiredis

        is_done = False
        try:
            for command in commands:
                self._send(hiredis.pack_command(command), deadline)
            room = value_bytes + _REPLY_BYTES * len(commands)
            for _ in commands:
                while (reply := self._reader.gets()) is False:
                    content = self._receive(deadline)
                    room -= len(content)
                    if room < 0:
                        raise RedisError(f"{self._address} sends more than was asked for")
                    self._reader.feed(content)
                yield reply
            is_done = True
        except TimeoutError:
            raise RedisError(f"{self._address} did not answer in time") from None
        except (OSError, hiredis.ProtocolError) as error:
            raise RedisError(f"{self._address} failed: {one_line(error, OSError)}") from None
        finally:
            if not is_done:
                self.close()

    def _wait_until(self, deadline: float) -> socket.socket:
        """The socket, which waits no longer than the deadline from now on."""
        left = deadline - time.monotonic()
        if self._socket is None or left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._socket

    def _send(self, content: bytes, deadline: float) -> None:
        self._wait_until(deadline).sendall(content)  # its timeout is for all of it

    def _receive(self, deadline: float) -> bytes:
        content = self._wait_until(deadline).recv(_RECEIVED_BYTES)
        if not content:
            raise ConnectionResetError("it closed the connection")
        return content


def agreed_seed(client: RedisClient, seed: int) -> int:
    """The seed of block digests of all who use the database, unsigned 64 bit: `seed`, if there is none.

    It is a random number, so that no client can make two prompts of one digest. Opens the connection; raises
    RedisError.
    """
    client.open()
    digits = f"{seed:016x}"
    asked = [("SETNX", _SEED_KEY, digits), ("GET", _SEED_KEY)]
    stored, found = client.exchange(asked, len(digits), _SEED_S)
    if isinstance(stored, Exception):
        raise RedisError(f"{client} does not store {_SEED_KEY}: {stored}")
    if not isinstance(found, bytes) or not re.fullmatch(b"[0-9a-f]{16}", found):
        raise RedisError(f"{_SEED_KEY} at {client} is damaged: remove all keys {KEY_PREFIX}*")
    return int(found, 16)
