"""Endpoints of the sockets between our processes, on one host and between nodes.

    ipc://PATH                        on one host, in a directory that only the user can open
    curve://KEY@ADDRESS:PORT          between nodes: TCP, encrypted and authenticated by ZMQ's CURVE
    curve://KEY@ADDRESS:PORT?fd=N     the same for the process that binds it: it inherits the listening socket

KEY is the 32-byte secret key of the side that binds, as hexadecimal digits. It is derived from the cluster
secret and the name of the endpoint, which holds the number of a life. A client must know the public key,
which is never sent, for its first message to be accepted: without the secret no connection gets further, and
neither does one of an earlier life.
"""

import hashlib
import os
import re
from typing import Any

import zmq
from zmq.utils import z85

__all__ = ["LINK_SILENCE_MS", "bind", "connect", "endpoint_key", "tcp_endpoint"]

_URL = re.compile(r"curve://(?P<key>[0-9a-f]{64})@(?P<address>[^@?]+:\d+)(?:\?fd=(?P<fd>\d+))?")
_MAX_MESSAGE_BYTES = 64 << 20
# How long a connection may take to prove that it knows the key.
_HANDSHAKE_MS = 5000
# libzmq's threads exchange pings: a peer that vanished without a FIN is noticed after their sum.
_PING_MS = 500
_SILENCE_MS = 4000
LINK_SILENCE_MS = 3000
"""For the links between supervisors: less, so that they know the cause before others see an effect."""
_CONNECT_MS = 3000


def endpoint_key(secret: bytes, name: str) -> str:
    """The key of the endpoint called `name` in the cluster with this secret."""
    shared = hashlib.blake2b(secret, digest_size=32).digest()
    return hashlib.blake2b(name.encode(), key=shared, digest_size=32).hexdigest()


def tcp_endpoint(key: str, address: str, port: int, fd: int | None = None) -> str:
    """The endpoint at a port; `fd` is the listening socket in the process that binds it."""
    return f"curve://{key}@{address}:{port}" + ("" if fd is None else f"?fd={fd}")


def bind(socket: "zmq.Socket[Any]", endpoint: str, silence_ms: int = _SILENCE_MS) -> None:
    """Bind a socket; over TCP a peer that is silent for so long is disconnected. Raises ZMQError."""
    parts = _URL.fullmatch(endpoint)
    if parts is None:
        socket.bind(endpoint)
        return
    _set_options(socket, silence_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.curve_secretkey = z85.encode(bytes.fromhex(parts["key"]))
    socket.curve_server = True
    if parts["fd"]:
        # A connection that ends between poll and accept must not block libzmq's thread.
        os.set_blocking(int(parts["fd"]), False)
        socket.setsockopt(zmq.USE_FD, int(parts["fd"]))
    socket.bind("tcp://" + parts["address"])


def connect(socket: "zmq.Socket[Any]", endpoint: str, silence_ms: int = _SILENCE_MS) -> None:
    """As `bind`; does not wait."""
    parts = _URL.fullmatch(endpoint)
    if parts is None:
        socket.connect(endpoint)
        return
    _set_options(socket, silence_ms)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_public(z85.encode(bytes.fromhex(parts["key"])))
    socket.connect("tcp://" + parts["address"])


def _set_options(socket: "zmq.Socket[Any]", silence_ms: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
