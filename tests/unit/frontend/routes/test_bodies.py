"""Bounds on request bodies: their size, memory, structure and field names."""

import gzip
import json
import logging
import select
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.compression_utils import HAS_BROTLI

from frontend.api.chat.schema import CHAT
from frontend.api.completions.schema import COMPLETIONS
from frontend.api.schemas.structure import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_structure
from frontend.errors import OverloadedError, RequestError
from frontend.http.body_memory import BodyMemory
from frontend.http.limits import HttpLimits
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import error_of, post_head, raw_response, read_response

LIMITS = HttpLimits(max_body_bytes=1 << 20, max_body_memory=2 << 20, body_deadline_s=5.0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("bodies")
    checkpoint = tiny_tokenizer.checkpoint(directory)
    with (
        FakeCore(directory, lambda _: Script([70])) as core,
        running_frontend(core, checkpoint, limits=LIMITS) as client,
    ):
        yield client


def refused(body: bytes, lenient: bool = False) -> RequestError:
    with pytest.raises(RequestError) as caught:
        COMPLETIONS.decode(body, lenient)
    return caught.value


# Structure


ELEMENTS = [
    (b'{"metadata": [', b'"",', b'""]}', MAX_STRINGS),
    (b'{"metadata": [', b"[],", b"[]]}", MAX_CONTAINERS),
    (b'{"metadata": [', b"{},", b"{}]}", MAX_CONTAINERS),
    (b'{"prompt": [', b"5,", b"5]}", MAX_VALUES),
]


@pytest.mark.parametrize(("head", "element", "tail", "limit"), ELEMENTS, ids=range(len(ELEMENTS)))
def test_structure_is_bounded(head: bytes, element: bytes, tail: bytes, limit: int) -> None:
    check_structure(head + element * (limit - 4) + tail)
    with pytest.raises(RequestError, match="send"):
        check_structure(head + element * (limit + 4) + tail)


@pytest.mark.parametrize(
    "text", ['"' * (MAX_STRINGS * 3), "{[," * MAX_VALUES, "\\" * (1 << 18), '\\"' * (MAX_STRINGS * 3)]
)
def test_characters_inside_strings_are_not_structure(text: str) -> None:
    check_structure(json.dumps({"prompt": text}).encode())


def test_strings_that_end_with_a_backslash_are_counted() -> None:
    with pytest.raises(RequestError, match="strings"):
        check_structure(b'{"stop": [' + b'"\\\\",' * (MAX_STRINGS + 1) + b'""]}')


def test_the_structure_is_checked_before_parsing() -> None:
    body = b"{" + b",".join(b'"%d":1' % i for i in range(MAX_STRINGS + 1)) + b", no JSON"
    assert "field names" in refused(body).message


# Names


def test_only_the_first_refused_fields_are_reported() -> None:
    body = json.dumps({f"x{i:05}": 1 for i in range(2000)}).encode()
    error = refused(body)
    assert error.param == "x00000"
    assert error.message.count("is not a field") == 8
    assert "1992 more" in error.message
    _, warnings = COMPLETIONS.decode(body, lenient=True)
    assert len(warnings) == 9


def test_the_length_of_names_is_bounded() -> None:
    error = refused(json.dumps({"x" * 1025: 1}).encode(), lenient=True)
    assert "has 1025 characters" in error.message


@pytest.mark.parametrize(("field", "param"), [("", None), ("logit_bias", "logit_bias")])
def test_the_number_of_fields_is_bounded(field: str, param: str | None) -> None:
    names = {str(i): 1 for i in range(2049)}
    error = refused(json.dumps({field: names} if field else names).encode(), lenient=True)
    assert (error.param, "at most 2048" in error.message) == (param, True)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (rb'{"max_tokens": 1, "max\u005ftokens": 2}', "max_tokens"),
        (rb'{"max\u005ftokens": 1, "max_tokens": 2}', "max_tokens"),
        (rb'{"n": 12, "n": 1}', "n"),
        (rb'{"n": 1, "n": 12}', "n"),
        (rb'{"n": 1, "\u006e": 1}', "n"),
        (rb'{"prompt": "\n", "n": 12, "seed": 5, "n": 1}', "n"),
        (rb'{"prompt": ["\n"], "prompt": ["\n"]}', "prompt"),
        (rb'{"zzz": null, "zzz": null}', "zzz"),
        (rb'{"logit_bias": {"5": 1, "\u0035": 2}}', "logit_bias.5"),
        (rb'{"stream_options": {"include_usage": 1, "include_usage": 2}}', "stream_options.include_usage"),
    ],
)
def test_duplicate_names_are_refused(body: bytes, name: str) -> None:
    error = refused(body)
    assert (error.param, "more than once" in error.message) == (name, True)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "}{\"n\": 1, \"n\": 2", "n": 1}',
        rb' { "prompt" : [ "n" , "n\n" ] , "n" : 1 } ',
        rb'{"user": "\\", "n": 1, "seed": 12}',
        rb'{"metadata": {"n": "\n"}, "n": 1}',
        b"{}",
    ],
)
def test_unique_names_are_accepted(body: bytes) -> None:
    COMPLETIONS.decode(body, lenient=False)


@pytest.mark.parametrize("body", [b'{"prompt": "a\xe9"}', b'{"prompt": ["a", "\xe9"]}', b'{"\xe9": 1}'])
def test_a_byte_that_is_not_utf8_is_named(body: bytes) -> None:
    assert refused(body).message == "the body is not valid JSON: a text has the byte 0xe9, not UTF-8"


def test_null_is_absent_at_every_level() -> None:
    body = {"zzz": None, "stream": True, "stream_options": {"include_usage": True, "zzz": None}}
    request, warnings = COMPLETIONS.decode(json.dumps(body).encode(), lenient=False)
    assert request.stream_options.include_usage and warnings == []
    error = refused(b'{"stream_options": {"zzz": 1}}')
    assert error.param == "stream_options.zzz"


def test_integers_may_be_written_as_floats() -> None:
    request, _ = COMPLETIONS.decode(b'{"max_tokens": 16.0, "n": 2.00, "temperature": 1.0}', lenient=False)
    assert (request.max_tokens, request.n, request.temperature) == (16, 2, 1.0)
    assert refused(b'{"max_tokens": 16.5}').param == "max_tokens"


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}, ["a"], "a"],
)
def test_metadata_is_bounded(metadata: Any) -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.decode(json.dumps({"metadata": metadata}).encode(), lenient=False)
    assert (caught.value.param or "").startswith("metadata")


@pytest.mark.parametrize("metadata", [None, {}, {"a" * 64: "x" * 512}, {str(i): "x" for i in range(16)}])
def test_metadata_within_the_bounds(metadata: Any) -> None:
    CHAT.decode(json.dumps({"metadata": metadata}).encode(), lenient=False)


def test_unknown_fields_of_content_parts_are_named(client: Client) -> None:
    def ask(**more: Any) -> tuple[int, Any]:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **more}]
        return client.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])

    status, response = ask(foo=1)
    assert (status, response["error"]["param"]) == (400, "messages[0].content[1].foo")
    assert ask(foo=None)[0] == 200


def test_token_ids_of_logit_bias_have_one_spelling(client: Client) -> None:
    status, response = client.post("/v1/completions", prompt="x", logit_bias={"05": 1, "5": 2})
    assert (status, response["error"]["param"]) == (400, "logit_bias")


# Size and memory


def test_a_declared_size_above_the_limit_is_refused_at_once(client: Client) -> None:
    status, _, response = raw_response(client, post_head(LIMITS.max_body_bytes + 1))
    assert (status, "--max-body-bytes" in error_of(response)["message"]) == (413, True)


def test_a_chunked_body_above_the_limit_is_a_413(client: Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"20000\r\n" + b" " * 0x20000 + b"\r\n"
    status, _, _ = raw_response(client, head + chunk * 9)
    assert status == 413


def test_a_compressed_body_is_read(client: Client) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    status, _, _ = client.exchange("POST", "/v1/completions", raw=body, headers={"Content-Encoding": "gzip"})
    assert status == 200


def test_a_compression_bomb_is_a_413(client: Client) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(64)), packer.flush()])
    assert len(bomb) < LIMITS.max_body_bytes
    status, _, _ = client.exchange("POST", "/v1/completions", raw=bomb, headers={"Content-Encoding": "gzip"})
    assert status == 413


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "body",
    [b"garbage!" * 4, gzip.compress(b'{"prompt": "x"}' * 50, mtime=0)[:30]],
    ids=["garbage", "cut off"],
)
def test_a_malformed_compressed_body_writes_no_traceback(
    client: Client, encoding: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        status, data, _ = client.exchange(
            "POST", "/v1/completions", raw=body, headers={"Content-Encoding": encoding}
        )
        assert client.call("GET", "/health")[0] == 200
    assert (status, error_of(data)["type"]) == (400, "invalid_request_error")
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("encoding", ["lzma", "gzip, gzip"] + ["br"] * (not HAS_BROTLI))
def test_an_encoding_that_is_not_decoded_is_named(client: Client, encoding: str) -> None:
    raw = b'{"prompt": "x"}'
    headers = {"Content-Encoding": encoding}
    status, data, _ = client.exchange("POST", "/v1/completions", raw=raw, headers=headers)
    assert (status, error_of(data)["param"]) == (400, "Content-Encoding")
    assert "gzip or deflate" in error_of(data)["message"]


def test_body_memory_is_exact() -> None:
    memory = BodyMemory(10)
    memory.reserve(6)
    with pytest.raises(OverloadedError) as caught:
        memory.reserve(5)
    assert (caught.value.status, caught.value.retry_after_s, memory.used) == (429, 1, 6)
    memory.reserve(4)
    memory.release(10)
    assert memory.used == 0


def test_the_memory_of_all_bodies_is_bounded(client: Client) -> None:
    """There is memory for two of three unfinished bodies, and for others when these have ended."""
    size, sent = LIMITS.max_body_bytes, LIMITS.max_body_bytes - 4096
    connections = [socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) for _ in range(3)]
    for connection in connections:
        connection.sendall(post_head(size) + b" " * sent)
    (refused,), _, _ = select.select(connections, [], [], DEADLINE_S)
    status, head, _ = read_response(refused)
    assert (status, b"Retry-After: 1\r\n" in head) == (429, True)
    for connection in connections:
        if connection is not refused:
            connection.sendall(b" " * (size - sent))
            assert read_response(connection)[0] == 400
        connection.close()
    assert client.exchange("POST", "/v1/completions", raw=b'{"prompt": "x"}')[0] == 200
