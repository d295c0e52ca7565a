"""Request bodies that cost the server the most: the largest legal ones, and the worst refused ones."""

import gzip
import json
from dataclasses import dataclass

from frontend.api.schemas.structure import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from frontend.http.limits import HttpLimits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
SIZE = HttpLimits.max_body_bytes
USER = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class Case:
    """One body and the statuses that it may get."""

    name: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = (400,)
    encoding: str | None = None
    chunk_size: int | None = None
    """Send as HTTP chunks of this size."""


def filled(head: bytes, element: bytes, tail: bytes, count: int | None = None) -> bytes:
    """`element` repeated `count` times, or up to the size limit."""
    if count is None:
        count = (SIZE - len(head) - len(tail)) // len(element)
    return head + element * count + tail


def worst_bodies() -> list[Case]:
    """The catalogue; bodies have up to 8 MiB."""
    return [*_texts(), *_structures(), *_messages(), *_items(), *_encodings()]


def _texts() -> list[Case]:
    cases = [
        Case(f"{path} text of {name}", path, filled(head, element, b'"}'))
        for path, head in ((COMPLETIONS, b'{"prompt":"'), (TOKENIZE, b'{"prompt":"'))
        for name, element in (
            ("letters", b"a"),
            ("digits", b"1"),
            ("spaces", b" "),
            ("words", b"hello "),
            ("newlines", b"\\n"),
            ("quotes", b'\\"'),
            ("backslashes", b"\\\\"),
            ("escaped accents", b"\\u00e9"),
            ("escaped emoji", b"\\ud83e\\udd8a"),
            ("Chinese", "你".encode()),
            ("emoji", "🦊".encode()),
            ("brackets", b"[{,"),
        )
    ]
    chat = b'{"messages":[{"role":"user","content":"'
    return [
        *cases,
        Case("chat text of letters", CHAT, filled(chat, b"a", b'"}]}')),
        Case("chat text of quotes", CHAT, filled(chat, b'\\"', b'"}]}')),
        Case("white space", COMPLETIONS, filled(b'{"prompt":"x","max_tokens":1', b" ", b"}"), (200,)),
    ]


def _structures() -> list[Case]:
    names = b",".join(b'"x%d":1' % i for i in range(SIZE // 12))
    few_names = b",".join(b'"x%d":1' % i for i in range(MAX_STRINGS - 8))
    return [
        Case("2 million unknown names", COMPLETIONS, b'{"prompt":"x",' + names + b"}"),
        Case("65,000 unknown names", COMPLETIONS, b'{"prompt":"x",' + few_names + b"}"),
        Case("metadata of objects", COMPLETIONS, filled(b'{"prompt":"x","metadata":[', b"{},", b"{}]}")),
        Case("65,000 objects", COMPLETIONS, filled(b'{"user":[', b"{},", b"{}]}", MAX_CONTAINERS - 8)),
        Case("metadata of names", COMPLETIONS, b'{"prompt":"x","metadata":{' + few_names + b"}}"),
        Case("deep arrays", COMPLETIONS, filled(b'{"prompt":', b"[", b"")),
        Case("deep objects", COMPLETIONS, filled(b'{"metadata":', b'{"a":', b"1")),
        Case("the most ids", COMPLETIONS, filled(b'{"prompt":[', b"12345,", b"5]}", MAX_VALUES - 8)),
        Case("too many ids", COMPLETIONS, filled(b'{"prompt":[', b"5,", b"5]}")),
        Case("65,000 prompts", COMPLETIONS, filled(b'{"prompt":[', b'"a",', b'"a"]}', MAX_STRINGS - 8)),
        Case("65,000 lists", COMPLETIONS, filled(b'{"prompt":[', b"[5],", b"[5]]}", MAX_CONTAINERS - 8)),
        Case("1,025 prompts", COMPLETIONS, filled(b'{"prompt":[', b'"hello hello",', b'"a"]}', 1024)),
        Case("empty lists", COMPLETIONS, filled(b'{"prompt":[', b"[],", b"[5]]}")),
        Case("long name", COMPLETIONS, filled(b'{"', b"a", b'":1}')),
        Case("long number", COMPLETIONS, filled(b'{"max_tokens":', b"9", b"}")),
        Case("logit_bias", COMPLETIONS, b'{"prompt":"x","logit_bias":{' + few_names + b"}}"),
        Case(
            "stop strings", COMPLETIONS, filled(b'{"prompt":"x","stop":[', b'"a",', b'"a"]}', MAX_STRINGS - 8)
        ),
        Case("bad_words", COMPLETIONS, filled(b'{"prompt":"x","bad_words":[', b'"a",', b'"a"]}', 60_000)),
        Case(
            "the most allowed ids",
            COMPLETIONS,
            filled(b'{"prompt":"x","max_tokens":1,"allowed_token_ids":[', b"5,", b"5]}", MAX_VALUES - 8),
            (200, 400),
        ),
        Case("detokenize", DETOKENIZE, filled(b'{"tokens":[', b"12,", b"5]}", MAX_VALUES - 8)),
        Case("no JSON", COMPLETIONS, b"\xff" * SIZE),
        Case("zeros", COMPLETIONS, bytes(SIZE)),
    ]


def _messages() -> list[Case]:
    def chat(messages: list[object], **more: object) -> bytes:
        return json.dumps({"messages": messages, **more}).encode()

    part = {"type": "text", "text": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 200_000}}
    wide = {"type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 1_000_000 + "[]]"}}
    return [
        Case("100,000 messages", CHAT, chat([USER] * 100_000)),
        Case("16,000 messages", CHAT, chat([USER] * 16_000)),
        Case("16,000 parts", CHAT, chat([{"role": "user", "content": [part] * 16_000}])),
        Case("deep arguments", CHAT, chat([USER, {"role": "assistant", "tool_calls": [call]}]), (200, 400)),
        Case("wide arguments", CHAT, chat([USER, {"role": "assistant", "tool_calls": [wide]}]), (200, 400)),
        Case(
            "template variables", CHAT, chat([USER], chat_template_kwargs={str(i): i for i in range(60_000)})
        ),
    ]


def _items() -> list[Case]:
    """Bodies for the routes with typed items; counts keep within the most objects and strings of a body."""

    def body(**fields: object) -> bytes:
        return json.dumps(fields).encode()

    text = {"type": "text", "text": "a"}
    tool_use = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": []}}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 100}
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8)}}
    tools = [{"name": f"f{i}", "input_schema": schema} for i in range(1024)]
    blocks: list[tuple[str, dict[str, object]]] = [
        ("12,000 blocks", {"messages": [{**USER, "content": [text] * 12_000}]}),
        ("4,000 calls", {"messages": [{"role": "assistant", "content": [tool_use] * 4000}]}),
        ("12,000 system blocks", {"messages": [USER], "system": [text] * 12_000}),
        ("1,024 schemas", {"messages": [USER], "tools": tools}),
    ]
    instructions = b'{"input":"x","instructions":"'
    reasoning = b'{"input":[{"type":"reasoning","encrypted_content":"'
    items = [
        ("16,000 items", body(input=[USER] * 16_000)),
        ("5,000 calls", body(input=[call] * 5000)),
        ("60,000 tools", body(input="x", tools=[{}] * 60_000)),
        ("60,000 includes", body(input="x", include=["a"] * 60_000)),
        ("long instructions", filled(instructions, b"a ", b'"}')),
        ("long reasoning", filled(reasoning, b"YWFh", b'"}]}')),
    ]
    return [
        *(Case(f"messages: {name}", MESSAGES, body(max_tokens=1, **fields)) for name, fields in blocks),
        *(Case(f"responses: {name}", RESPONSES, data, (200, 400)) for name, data in items),
    ]


def _encodings() -> list[Case]:
    return [
        Case("too large", COMPLETIONS, b" " * (SIZE + 1), (413,)),
        Case("compressed spaces", COMPLETIONS, gzip.compress(b" " * (64 << 20)), (413,), "gzip"),
        Case("compressed garbage", COMPLETIONS, b"garbage" * 1000, (400,), "gzip"),
        Case("small chunks", COMPLETIONS, filled(b'{"prompt":"', b"a", b'"}', 1 << 20), (400,), None, 1),
    ]
