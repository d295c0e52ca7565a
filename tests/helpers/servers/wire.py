"""HTTP by hand: bytes to a server and responses from it, and its metrics as a test reads them."""

import json
import re
import socket
from typing import Any

from tests.helpers.servers.http_server import DEADLINE_S, Client


def error_of(data: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def raw_response(client: Client, data: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of the first response to bytes on a new connection."""
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        connection.sendall(data)
        return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, f"closed without a response, after {received!r}"
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(re.findall(rb"(?i)content-length: (\d+)", head)[0])
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split()[1]), head, body[:length]


def post_head(body_length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {body_length}", *more, "", ""]
    return "\r\n".join(lines).encode()


def metric(client: Client, name: str) -> float:
    _, data, _ = client.exchange("GET", "/metrics")
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", data.decode(), re.MULTILINE)
    assert found, f"no {name} in {data.decode()}"
    return sum(map(float, found))
