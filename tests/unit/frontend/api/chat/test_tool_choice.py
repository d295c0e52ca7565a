"""Calls that a grammar enforces, family by family: what a random model writes comes back as valid calls."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atom.shared.messages.grammar import GrammarSource
from frontend.api.chat.schema import ChatRequest
from frontend.api.chat.tool_choice import ToolChoice, call_constraint, optional_calls
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.structured_output import reply_constraint
from frontend.api.schemas.tools import Function
from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import ReplyDelta, ReplyFormat, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import TOOL_CALLS, TextFormat
from frontend.text.reply_formats.harmony import HarmonyFormat, _Tag
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from workers.grammar.compiling import compile_source
from workers.grammar.vocabulary import tokenizer_info

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "maybe": {"type": ["string", "null"]},
        "places": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        "yes": {"type": "boolean"},
        "ratio": {"type": "number"},
    },
    "required": ["city", "days", "unit", "deep"],
    "additionalProperties": False,
}
TOTALS = {"type": "object", "additionalProperties": {"type": "integer"}}
FUNCTIONS = [
    Function(name="look", parameters=LOOK, strict=True),
    Function(name="add", parameters=TOTALS, strict=True),
    Function(name="wait", strict=True),
]
CLOSED = {"additionalProperties": False}
SCHEMAS = {function.name: function.parameters or {} for function in FUNCTIONS}
CLOSING = ('"', "}", "]", ",", ")", "=")
SPACES = (" ", "\n", "\r", "\t")
STEPS = 150
"""After them the random model closes what it has opened."""
ENFORCED = (
    *(
        "hermes",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "kimi_k2",
        "qwen3_coder",
        "glm45",
    ),
    *("minimax_m2", "mistral", "granite", "phi4_mini_json", "olmo3", "pythonic"),
)
HARMONY = "openai"
WITH_SPECIAL = (HARMONY, "hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "mistral", "granite", "olmo3")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


VALUES: dict[str, Callable[[Any], bool]] = {
    "city": is_text,
    "days": lambda value: type(value) is int,
    "unit": lambda value: value in ("C", "F"),
    "code": lambda value: is_text(value) and re.fullmatch("[a-z]{2}", value) is not None,
    "maybe": lambda value: value is None or is_text(value),
    "places": lambda value: isinstance(value, list) and all(map(is_text, value)),
    "deep": lambda value: is_text(value["text"]),
    "yes": lambda value: isinstance(value, bool),
    "ratio": lambda value: type(value) in (int, float),
}
"""What the properties of LOOK may be."""


def is_valid(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the arguments of a function have its schema."""
    match name:
        case "look":
            known = {*LOOK["required"]} <= arguments.keys() <= VALUES.keys()
            return known and all(VALUES[key](value) for key, value in arguments.items())
        case "add":
            return all(type(value) is int for value in arguments.values())
    return name == "wait" and not arguments


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except ValueError:
        return False
    return True


class Model:
    """Writes replies of random allowed tokens, in one family's vocabulary."""

    def __init__(self, directory: Path, family: str, special: bool):
        import xgrammar

        own = [tag.value for tag in _Tag] if family == HARMONY else TOOL_CALLS[family].MARKERS
        markers = [*own, "</parameter>", "</function>"]
        tags, texts = (own, []) if special else ((), markers)
        checkpoint = tiny_tokenizer.checkpoint(directory, tags=tags, texts=texts)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        assert tokenizer is not None
        self.tokenizer, self.vocab_size = tokenizer, checkpoint.vocab_size
        self.format: ReplyFormat = (
            HarmonyFormat(tokenizer) if family == HARMONY else TextFormat(TOOL_CALLS[family], None, tokenizer)
        )
        self.eos = checkpoint.eos_token_ids[0]
        self.markers = [i for text in [*tags, *texts] if (i := tokenizer.added_id(text)) is not None]
        # Calls without a marker begin with these, of which a random reply would write none.
        names = sorted({function.name[0] for function in FUNCTIONS})
        self.begin = [[*map(self.token, each)] for each in ("[", names)] if family == "pythonic" else []
        self.closing = [*self.markers, *map(self.token, CLOSING)]
        self.spaces = [*map(self.token, SPACES)]
        self.fragments = [i for i in range(self.vocab_size) if not is_utf8(tokenizer.token_bytes(i))]
        self.compiler = xgrammar.GrammarCompiler(tokenizer_info(checkpoint), max_threads=1)

    def token(self, text: str) -> int:
        (token_id,) = self.tokenizer.encode(text, add_special_tokens=False)
        return token_id

    def compiled(self, source: GrammarSource) -> Any:
        grammar, warnings = compile_source(source, self.compiler)
        assert warnings == []
        return grammar

    def walk(self, grammar: Any, seed: int) -> list[int]:
        """The ids of a reply up to its end."""
        import xgrammar

        matcher, choose = xgrammar.GrammarMatcher(grammar), random.Random(seed)
        mask = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        ids: list[int] = []
        begin = self.begin if seed % 2 else []
        while True:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: self.vocab_size]
            for avoided in (self.fragments, self.spaces if len(ids) > STEPS else []):
                if bits.sum() > bits[avoided].sum():
                    bits[avoided] = 0
            allowed = np.flatnonzero(bits).tolist()
            favoured = [i for i in (self.closing if len(ids) > STEPS else self.markers) if bits[i]]
            if len(ids) < len(begin) and (calls := [i for i in begin[len(ids)] if bits[i]]):
                chosen = choose.choice(calls)
            elif len(ids) > STEPS and bits[self.eos]:
                chosen = self.eos
            elif favoured and (len(ids) > STEPS or choose.random() < 0.1):
                chosen = choose.choice(favoured)
            else:
                chosen = choose.choice(allowed)
            assert matcher.accept_token(chosen)
            if matcher.is_terminated():
                return ids
            ids.append(chosen)
            assert len(ids) < 10 * STEPS, self.tokenizer.decode(ids, skip_special_tokens=False)

    def parsed(self, ids: list[int]) -> ReplyDelta:
        parser = self.format.parser(ReplyOptions(tools=SCHEMAS, enforced=True))
        detokenizer, total = Detokenizer(self.tokenizer), ReplyDelta()
        deltas = [parser.feed(token_id, detokenizer.feed(token_id)) for token_id in ids]
        for delta in [*deltas, parser.finish(detokenizer.finish(), complete=True)]:
            total.text += delta.text
            total.reasoning += delta.reasoning
            merge_calls(total.calls, delta.calls)
        return total


@pytest.fixture(
    scope="module",
    params=[*((family, False) for family in ENFORCED), *((family, True) for family in WITH_SPECIAL)],
    ids=lambda param: f"{param[0]}-{'special' if param[1] else 'text'}",
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), *request.param)


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        (ToolChoice("required"), True),
        (ToolChoice("required"), False),
        (ToolChoice("named", ("look",)), True),
        (ToolChoice("auto"), True),
        (ToolChoice("required", ("look", "wait")), True),
        (ToolChoice("auto", ("wait",)), True),
    ],
    ids=["required", "single", "named", "auto", "required of two", "auto of one"],
)
def test_random_replies_are_valid_calls(model: Model, choice: ToolChoice, parallel: bool) -> None:
    constraint = call_constraint(choice, FUNCTIONS, model.format.call_text, parallel, model.format.frame)
    assert constraint is not None
    grammar, called = model.compiled(constraint.source), 0
    for seed in range(8):
        ids = model.walk(grammar, seed)
        reply = model.parsed(ids)
        text = model.tokenizer.decode(ids, skip_special_tokens=False)
        called += len(reply.calls)
        for call in reply.calls:
            assert is_valid(call.name, json.loads(call.arguments)), (text, call)
        if choice.mode != "auto":
            assert reply.calls and not reply.text, text
        if not parallel or choice.mode == "named":
            assert len(reply.calls) == 1, text
        assert {call.name for call in reply.calls} <= set(choice.names or SCHEMAS), text
    assert called


@pytest.mark.parametrize("wanted", ["json_schema", "regex", "choice"])
def test_with_tools_a_reply_is_calls_or_the_structured_output(model: Model, wanted: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]} | CLOSED
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "json_schema": ({"guided_json": schema}, r"\{.*\"n\".*\}"),
        "regex": ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        "choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    }
    fields, pattern = cases[wanted]
    request = msgspec.convert({"model": "m", "messages": [], **fields}, ChatRequest)
    frame = model.format.frame
    calls = optional_calls(ToolChoice("auto"), FUNCTIONS, model.format.call_text, True, frame)
    constraint = reply_constraint(request, Prompt([1], optional_calls=calls, frame=frame))
    assert constraint is not None
    grammar, kinds = model.compiled(constraint.source), set()
    for seed in range(12):
        reply = model.parsed(model.walk(grammar, seed))
        kinds.add(bool(reply.calls))
        assert frame is None or len(reply.calls) <= 1, "a framed reply ends with its call"
        for call in reply.calls:
            assert is_valid(call.name, json.loads(call.arguments)), call
        assert reply.calls or re.fullmatch(pattern, reply.text, re.DOTALL), reply
    assert kinds == {True, False}


def test_structured_output_after_the_reasoning_of_harmony(tmp_path: Path) -> None:
    model = Model(tmp_path, HARMONY, special=True)
    request = msgspec.convert({"model": "m", "messages": [], "guided_regex": "[0-9]{3}"}, ChatRequest)
    constraint = reply_constraint(request, Prompt([1], frame=model.format.frame))
    assert constraint is not None
    grammar, reasoned = model.compiled(constraint.source), 0
    for seed in range(12):
        reply = model.parsed(model.walk(grammar, seed))
        assert re.fullmatch("[0-9]{3}", reply.text) and not reply.calls
        reasoned += bool(reply.reasoning)
    assert reasoned
