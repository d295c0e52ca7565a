"""Thousands of invalid requests, reproducible from a seed."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from frontend.api.chat.schema import CHAT
from frontend.api.completions.schema import COMPLETIONS
from frontend.api.messages.schema import COUNT, MESSAGES
from frontend.api.responses.schema import INPUT_TOKENS, RESPONSES
from frontend.api.tokenization.schema import DETOKENIZE, TOKENIZE
from frontend.openapi.operations import OPERATIONS

_DEEP = 3000

NASTY = [
    *("null", "true", "false", "0", "-0.0", "-1", "1", "2", "3", "0.5", "1.5", "-2.5", "1e-400"),
    *("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "2147483648", "-2147483649"),
    *("9223372036854775808", "18446744073709551616", "1" + "0" * 400, "0x10", "01", "1.", "+1"),
    *('""', '" "', '"x"', '"none"', '"auto"', '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\udc00\\ud800"'),
    *('"\\uffff"', '"😀"', '"\\ud83d\\ude00"', '"' + "x" * 5000 + '"', '"%s%n{0}{{}}"', '"../../etc"'),
    *("[]", "[[]]", "[null]", "[1]", "[0, 1, 2]", '[1, "a"]', "[-1]", "[1099511627776]", "[1.5]", '["x"]'),
    *('[""]', "[[1], [2]]", "[[1], []]", "[true]", "[" + "0, " * 5000 + "0]", '["x", "x"]', "[{}]"),
    *("{}", '{"a": 1}', '{"1": 1}', '{"1": 1e400}', '{"99999999": 5}', '{"-1": 5}', '{"type": "text"}'),
    *('{"type": "json_object"}', '{"role": "user", "content": "hi"}', '{"include_usage": true}'),
    *("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, "[" * _DEEP, "tru", "'x'", ""),
    '[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]',
    '[{"role": "user", "content": "x"}, {"role": "user", "content": null}]',
    '[{"role": "user"}]',
    '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"a": 1}]}]}]',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": []}}]}]',
    '[{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}, {"type": "reasoning"}]',
    '[{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]}]',
    '[{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]',
    '[{"content": "x"}]',
    '[{"role": 5, "content": "x"}]',
    '[{"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": "{"}}]}]',
]


@dataclass(frozen=True)
class Target:
    """A route, its minimal body, and all its known fields."""

    path: str
    base: dict[str, str]
    fields: list[str]


def _target(path: str, schema: object, **base: object) -> Target:
    known = {*schema.struct.__struct_fields__, *schema.neutral, *schema.harmless}  # type: ignore[attr-defined]
    return Target(path, {name: json.dumps(value) for name, value in base.items()}, sorted(known))


TARGETS = [
    _target("/v1/completions", COMPLETIONS, prompt="one two", max_tokens=2),
    _target("/v1/chat/completions", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=2),
    _target("/v1/messages", MESSAGES, messages=[{"role": "user", "content": "hi"}], max_tokens=2),
    _target("/v1/responses", RESPONSES, input="hi", max_output_tokens=2),
    _target("/v1/responses/input_tokens", INPUT_TOKENS, input="hi"),
    _target("/v1/messages/count_tokens", COUNT, messages=[{"role": "user", "content": "hi"}]),
    _target("/tokenize", TOKENIZE, prompt="one two"),
    _target("/detokenize", DETOKENIZE, tokens=[5, 6]),
]
_WEIGHTS = [5, 5, 3, 3, 1, 1, 1, 1]


def hostile_bodies(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(path, body): first every field with every nasty value, then mixtures."""
    source = random.Random(seed)
    table = [
        (target.path, _render({**target.base, name: value}))
        for target in TARGETS
        for name in target.fields
        for value in NASTY
    ]
    source.shuffle(table)
    yield from table[: count // 2]
    for _ in range(count - min(len(table), count // 2)):
        yield _mixture(source)


@dataclass(frozen=True)
class Odd:
    """A request to any route, with odd names in its path and odd headers."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


_METHODS = ["GET", "GET", "GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD", "TRACE"]
_ENDLESS = "/status/events"
_NAMES = [
    *("x", "..", "%2e%2e%2f", "%00", "%ff%fe", "%F0%9F%98%80", "a" * 4000, "{id}", "*", "cmpl-1"),
    *("%0d%0aX: y", "random", "random/", "a/b/c", "?stream=true", "?" + "a=1&" * 900, "#", "%", "%zz"),
    *("'", '"'),
]
_HEADERS = {
    "X-Request-Timeout": ["", "0", "-1", "1e9", "9" * 5000, "nan", "0.001", "30"],
    "X-Data-Parallel-Rank": ["", "0", "1", "-1", "999999999999", "x"],
    "X-Request-Id": ["", "x", "a" * 5000, "../..", "ü"],
    "traceparent": ["", "x", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "0" * 8000],
    "Origin": ["null", "https://example.org", "x" * 5000, ""],
    "Access-Control-Request-Method": ["POST", "", "x y", "PATCH"],
    "Access-Control-Request-Headers": ["authorization", ",,,", "a," * 2000],
    "Authorization": ["Bearer", "Bearer x", "Basic " + "x" * 5000],
    "Content-Encoding": ["gzip", "identity", "br", "x"],
    "If-None-Match": ["*", '"x"', "x" * 5000, 'W/"'],
    "Range": ["bytes=0-", "bytes=-1", "x"],
    "Accept": ["text/event-stream", "x"],
}


def odd_requests(seed: int, count: int) -> Iterator[Odd]:
    """To all routes, in turn."""
    source = random.Random(seed)
    paths = [operation.path for operation in OPERATIONS if operation.path != _ENDLESS]
    for number in range(count):
        path = re.sub(r"\{\w+\}", lambda _: source.choice(_NAMES), paths[number % len(paths)])
        if not source.randrange(8):
            path += source.choice(_NAMES)
        chosen = source.sample(sorted(_HEADERS), source.randrange(4))
        headers = {name: source.choice(_HEADERS[name]) for name in chosen}
        body = source.choice(NASTY).encode("utf-8", "surrogatepass") if source.randrange(2) else b""
        yield Odd(source.choice(_METHODS), path, headers, body)


def _mixture(source: random.Random) -> tuple[str, bytes]:
    target = source.choices(TARGETS, _WEIGHTS)[0]
    fields = dict(target.base)
    for name in source.choices(target.fields, k=source.randrange(1, 5)):
        fields[name] = source.choice(NASTY)
    body = _render(fields)
    match source.randrange(6):
        case 0:
            body = _damaged(source, body)
        case 1:
            body = source.randbytes(source.randrange(200))
        case 2:
            body = source.choice(NASTY).encode("utf-8", "surrogatepass")
    return target.path, body


def _render(fields: dict[str, str]) -> bytes:
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


def _damaged(source: random.Random, body: bytes) -> bytes:
    at = source.randrange(len(body))
    match source.randrange(4):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([source.randrange(256)]) + body[at + 1 :]
        case 2:
            return body[:at] + body[at + 1 :]
    return body[:at] + body[source.randrange(len(body)) :]
