"""Replies of every family, as their models write them, and what the parsers make of them."""

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import ReplyDelta, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import REASONING, TOOL_CALLS, TextFormat
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.text.tool_calls import (
    CALL,
    D_END,
    D_SECTION,
    END,
    K_CALL,
    K_CALL_END,
    K_END,
    K_SECTION,
    K_SEP,
    SECTION,
    SECTION_END,
    SEP,
    J,
)

TOKENIZER = tiny_tokenizer.tokenizer()
PLAIN = tiny_tokenizer.build()

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "object"},
    "list": {"type": "array"},
    "yes": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "code": {"type": "string"},
}
TOOLS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": PROPERTIES} for name in ("get_weather", "run", "f")
}
Call = tuple[str, dict[str, Any]]
Result = tuple[str, str, list[tuple[str, str]]]


class Shape(NamedTuple):
    """A reply: text before its calls, the calls."""

    text: str
    calls: list[Call]


SHAPES: dict[str, Shape] = {
    "no call": Shape("It is sunny, < 20 degrees.", []),
    "one": Shape("", [("get_weather", {"city": "Paris"})]),
    "text first": Shape("Let me look.", [("get_weather", {"city": "Paris", "days": 3})]),
    "no arguments": Shape("", [("run", {})]),
    "two": Shape("", [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]),
    "three": Shape("Now:", [("f", {"days": 1}), ("run", {"code": "x"}), ("f", {"days": -2})]),
    "unicode": Shape("好的 🦊", [("get_weather", {"city": "北京 🦊 é"})]),
    "lines": Shape("", [("run", {"code": "def f():\n    return {'a': [1, 2]}\n"})]),
    "quotes": Shape("", [("run", {"code": 'print("a\\n\\t\\"b\\"")'})]),
    "braces": Shape("", [("run", {"code": "{{}]}{"})]),
    "deep": Shape("", [("f", {"deep": {"a": {"b": [{"c": None}, {"d": "}"}]}}, "list": [1, [2, "]"]]})]),
    "types": Shape("", [("f", {"days": 0, "ratio": -1.5e3, "yes": True, "maybe": None, "city": ""})]),
    "number in a string": Shape("", [("get_weather", {"city": "75001", "days": 12})]),
    "markup": Shape("", [("run", {"code": "<b>1 < 2 && a</b> <tool> </parameter"})]),
    "long": Shape("", [("run", {"code": "word " * 60, "days": 7})]),
    "other name": Shape("I see <tool", [("get_weather", {"unknown": "x"})]),
}


def as_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def hermes(shape: Shape) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(values)}}}\n</tool_call>'
        for name, values in shape.calls
    ]
    return shape.text + "\n".join(blocks)


def llama(shape: Shape) -> str:
    calls = [f'{{"name": "{name}", "parameters": {as_json(values)}}}' for name, values in shape.calls]
    return shape.text + ("<|python_tag|>" if calls else "") + "; ".join(calls)


def deepseek_v31(shape: Shape) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(values)}<｜tool▁call▁end｜>"
        for name, values in shape.calls
    ]
    inner = "".join(calls)
    return shape.text + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v3(shape: Shape) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(values)}\n```<｜tool▁call▁end｜>"
        for name, values in shape.calls
    ]
    inner = "\n".join(calls)
    return shape.text + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v32(shape: Shape) -> str:
    calls = []
    for name, values in shape.calls:
        inner = (
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{plain(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in values.items()
        )
        calls.append(f'<｜DSML｜invoke name="{name}">\n{"".join(inner)}</｜DSML｜invoke>\n')
    section = f"\n\n{D_SECTION}\n{''.join(calls)}{D_END}" if calls else ""
    return shape.text + section


def of_v4(reply: str) -> str:
    """The section of V3.2 under its name in V4."""
    return reply.replace("｜DSML｜function_calls>", "｜DSML｜tool_calls>")


def kimi(shape: Shape) -> str:
    calls = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(values)}"
        "<|tool_call_end|>"
        for index, (name, values) in enumerate(shape.calls)
    ]
    inner = "".join(calls)
    return shape.text + (f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>" if calls else "")


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def qwen3_coder(shape: Shape) -> str:
    blocks = []
    for name, values in shape.calls:
        inner = "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in values.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return shape.text + "\n".join(blocks)


def glm(shape: Shape, line: str = "\n") -> str:
    blocks = []
    for name, values in shape.calls:
        pairs = (
            f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v)}</arg_value>{line}" for k, v in values.items()
        )
        blocks.append(f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>")
    return shape.text + line.join(blocks)


def minimax_m2(shape: Shape) -> str:
    calls = []
    for name, values in shape.calls:
        inner = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in values.items())
        calls.append(f'<invoke name="{name}">\n{inner}</invoke>\n')
    return shape.text + (f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>" if calls else "")


def mistral(shape: Shape, ids: bool = False) -> str:
    calls = [
        f"[TOOL_CALLS]{name}{f'[CALL_ID]{index:09}' if ids else ''}[ARGS]{as_json(values)}"
        for index, (name, values) in enumerate(shape.calls)
    ]
    return shape.text + "".join(calls)


def json_list(shape: Shape, begin: str, ids: bool = False) -> str:
    calls = []
    for index, (name, values) in enumerate(shape.calls):
        id_text = f', "id": "{index:09}"' if ids else ""
        calls.append(f'{{"name": "{name}", "arguments": {as_json(values)}{id_text}}}')
    return shape.text + (f"{begin}[{', '.join(calls)}]" if calls else "")


def phi4_mini(shape: Shape) -> str:
    calls = (f'{{"name": "{name}", "arguments": {as_json(values)}}}' for name, values in shape.calls)
    return shape.text + "".join(f"<|tool_call|>{call}<|/tool_call|>" for call in calls)


def olmo3(shape: Shape, value: Callable[[Any], str]) -> str:
    calls = [
        f"{name}({', '.join(f'{key}={value(given)}' for key, given in values.items())})"
        for name, values in shape.calls
    ]
    inner = "\n".join(calls)
    return shape.text + (f"<function_calls>{inner}</function_calls>" if calls else "")


def pythonic(shape: Shape, value: Callable[[Any], str], begin: str = "", end: str = "") -> str:
    """Without tags a list is calls at the beginning alone."""
    calls = [
        f"{name}({', '.join(f'{key}={value(given)}' for key, given in values.items())})"
        for name, values in shape.calls
    ]
    if not calls:
        return shape.text
    begin = begin or ("<|python_start|>" if shape.text else "")
    return f"{shape.text}{begin}[{', '.join(calls)}]{end}"


WRITERS: dict[str, tuple[str, Callable[[Shape], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "deepseek_v32": ("deepseek_v32", deepseek_v32),
    "deepseek_v4": ("deepseek_v4", lambda shape: of_v4(deepseek_v32(shape))),
    "kimi_k2": ("kimi_k2", kimi),
    "granite": ("granite", lambda shape: json_list(shape, "<|tool_call|>")),
    "granite 3.1": (
        "granite",
        lambda shape: json_list(shape, "<tool_call>") + "</tool_call>" * bool(shape.calls),
    ),
    "minimax_m2": ("minimax_m2", minimax_m2),
    "mistral": ("mistral", mistral),
    "mistral, ids": ("mistral", lambda shape: mistral(shape, ids=True)),
    "mistral, list": ("mistral", lambda shape: json_list(shape, "[TOOL_CALLS] ", ids=True)),
    "olmo3": ("olmo3", lambda shape: olmo3(shape, plain_json)),
    "olmo3, python": ("olmo3", lambda shape: olmo3(shape, repr)),
    "llama4_pythonic": (
        "llama4_pythonic",
        lambda shape: pythonic(shape, repr, "<|python_start|>", "<|python_end|>"),
    ),
    "pythonic": ("pythonic", lambda shape: pythonic(shape, repr)),
    "pythonic, json": ("pythonic", lambda shape: pythonic(shape, plain_json)),
    "phi4_mini_json": ("phi4_mini_json", lambda shape: json_list(shape, "functools")),
    "phi4_mini_json, tags": ("phi4_mini_json", phi4_mini),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "glm45": ("glm45", glm),
    "glm47": ("glm47", lambda shape: glm(shape, "")),
}


def parse(
    family: str | None,
    pieces: Iterable[str],
    complete: bool = True,
    reasoning: str | None = None,
    **options: Any,
) -> Result:
    """(content, reasoning, calls) of a reply that arrives in `pieces`."""
    calls = None if family is None else TOOL_CALLS[family]
    think = None if reasoning is None else REASONING[reasoning]
    parser = TextFormat(calls, think, None).parser(ReplyOptions(**{"tools": TOOLS} | options))
    total = ReplyDelta()
    for delta in [*(parser.feed(0, piece) for piece in pieces), parser.finish("", complete)]:
        total.text += delta.text
        total.reasoning += delta.reasoning
        merge_calls(total.calls, delta.calls)
    assert parser.called == bool(total.calls)
    assert [call.index for call in total.calls] == list(range(len(total.calls)))
    assert len({call.id for call in total.calls}) == len(total.calls) and all(c.id for c in total.calls)
    return total.text, total.reasoning, [(call.name, call.arguments) for call in total.calls]


def tokens(text: str) -> list[str]:
    """What a detokenizer returns for each token."""
    detokenizer = Detokenizer(TOKENIZER)
    ids = PLAIN.encode(text, add_special_tokens=False).ids
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


def everywhere(family: str | None, text: str, **options: Any) -> Result:
    """The result, which is the same wherever `text` is cut."""
    whole = parse(family, [text], **options)
    assert parse(family, text, **options) == whole
    assert parse(family, tokens(text), **options) == whole
    for at in range(1, len(text)):
        assert parse(family, [text[:at], text[at:]], **options) == whole, text[:at]
    return whole


def without_part(text: str, family: str, *more: str, markers: tuple[str, ...] | None = None) -> str:
    """`text` without the part of a marker that it ends with: one of `markers` or of `more`."""
    markers = (*(TOOL_CALLS[family].MARKERS if markers is None else markers), *more)
    parts = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return text[: len(text) - max((len(part) for part in parts if text.endswith(part)), default=0)]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=days>",
        "\n",
    ),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
    *(
        SECTION,
        SECTION_END,
        CALL,
        SEP,
        END,
        K_SECTION,
        K_END,
        K_CALL,
        K_SEP,
        K_CALL_END,
        "```json",
        "```",
    ),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "functools", "<|/tool_call|>", "123456789"),
    *("<function_calls>", "</function_calls>", "f(", "days=", "'", ")", "True", "</tool_call>"),
    *("<|python_start|>", "<|python_end|>", "[f(", ")]", "),", "(", "=", '"""'),
    *("<|python_tag|>", "{", "}", "[", "]", '"', "\\", ";", ",", J, '{"name": "f", "arguments": ', "f"),
    *('"name"', ": ", "function", "functions.f:0", "text", "你", "🦊", "<", "</", "days", "1", " "),
]
"""Pieces of replies of all families."""
