"""Tool calls in harmony's channels, through the output processor, in steps of any length."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from atom.shared.messages.engine import AddRequest, Finished, FinishReason, Sampling, TokenDeltas, pack_ids
from frontend.text.output_processor import SequenceOutput, TextOptions
from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.harmony import HarmonyFormat
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.engine.text_outputs import TextOutputs
from tests.unit.frontend.text.reply_formats.test_harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    TAGS,
    Part,
    ids_of,
    message,
)

TOOLS = {"f": {}, "get_weather": {}}
ARGUMENTS = '{"city": "北京 🦊", "deep": {"a": [1, {"b": "}<|call|>"}]}}'


def call(name: str, arguments: str = ARGUMENTS) -> list[Part]:
    return [CHANNEL, f"commentary to=functions.{name} ", CONSTRAIN, "json", MESSAGE, arguments, CALL]


def early(name: str, channel: str = "commentary") -> list[Part]:
    """The recipient before the channel."""
    return [
        *(START, f"assistant to=functions.{name}", CHANNEL, channel, CONSTRAIN, "json"),
        *(MESSAGE, ARGUMENTS, CALL),
    ]


THOUGHT = message("analysis", "I need the weather.")[2:]
NEXT: list[Part] = [START, "assistant"]
W = ("get_weather", ARGUMENTS)

REPLIES: list[tuple[list[Part], str, str, list[tuple[str, str]]]] = [
    # parts, content, reasoning, calls
    (call("get_weather"), "", "", [W]),
    (call("get_weather")[:-1], "", "", [W]),
    ([*THOUGHT, *NEXT, *call("get_weather")], "", "I need the weather.", [W]),
    ([*message("commentary", "Looking.")[2:], *NEXT, *call("get_weather")], "Looking.", "", [W]),
    ([*THOUGHT, *early("get_weather")], "", "I need the weather.", [W]),
    (early("f")[2:], ARGUMENTS, "", []),
    (early("get_weather", "analysis"), "", "", [W]),
    ([*call("get_weather")[:-1], END, *NEXT, *call("f", "{}")], "", "", [W, ("f", "{}")]),
    ([*call("get_weather"), *NEXT, *call("get_weather")], "", "", [W, W]),
    ([CHANNEL, "commentary to=functions.f json", MESSAGE, "{}", CALL], "", "", [("f", "{}")]),
    ([CHANNEL, "commentary to=functions.f", MESSAGE, "{}", CALL], "", "", [("f", "{}")]),
    ([CHANNEL, "analysis to=functions.f code", MESSAGE, "{}", CALL], "", "", [("f", "{}")]),
    ([CHANNEL, "commentary to=f ", CONSTRAIN, "json", MESSAGE, "{}", CALL], "", "", [("f", "{}")]),
    (call("f", ""), "", "", [("f", "{}")]),
    (call("f", "not json {"), "", "", [("f", "not json {")]),
    (call("unknown", "{}"), "", "", [("unknown", "{}")]),
    ([CHANNEL, "commentary to=browser.search ", MESSAGE, "{}", CALL], "", "{}", []),
    ([CHANNEL, "commentary to=python", MESSAGE, "1 + 1", CALL], "", "1 + 1", []),
    ([CHANNEL, "commentary to=functions.get_we"], "commentary to=functions.get_we", "", []),
    ([CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json"], "commentary to=functions.f  json", "", []),
    ([*call("f", "{}"), *NEXT, *message("final", "Done.")[2:-1], RETURN], "Done.", "", [("f", "{}")]),
    (
        message("final", "commentary to=functions.f <|call|>")[2:],
        "commentary to=functions.f <|call|>",
        "",
        [],
    ),
]


class Replies:
    """Runs ids through the output processor."""

    def __init__(self, directory: Path):
        checkpoint = tiny_tokenizer.checkpoint(directory, TAGS)
        self._tokenizer = Tokenizer.from_checkpoint(checkpoint)
        assert self._tokenizer is not None
        self._format = HarmonyFormat(self._tokenizer)

    def parse(self, ids: Sequence[int], step: int, options: ReplyOptions) -> SequenceOutput:
        output = TextOutputs(self._tokenizer)
        request = AddRequest([1], pack_ids([5]), 1000, Sampling(0.0, 0, 1.0, 0.0, seed=1))
        output.add(request, TextOptions(reply=lambda: self._format.parser(options)))
        total = SequenceOutput(1, array("i"))
        for begin in range(0, len(ids), step):
            new = ids[begin : begin + step]
            ends = [Finished(1, FinishReason.MAX_TOKENS)] if begin + step >= len(ids) else []
            deltas = TokenDeltas(1, [1], pack_ids(new), [len(new)], [], ends)
            for update in output.process(deltas).updates:
                total.merge(update)
        return total


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Replies:
    return Replies(tmp_path_factory.mktemp("harmony-tools"))


@pytest.mark.parametrize(("parts", "content", "reasoning", "calls"), REPLIES)
def test_calls(
    replies: Replies, parts: list[Part], content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    ids = ids_of(parts)
    for step in (1, 2, 3, 5, 8, 1000):
        found = replies.parse(ids, step, ReplyOptions(TOOLS))
        assert (found.text, found.reasoning) == (content, reasoning), step
        assert [(given.name, given.arguments) for given in found.calls] == calls
        assert found.called == bool(calls)


def test_cut_replies_are_beginnings(replies: Replies) -> None:
    ids = ids_of([*THOUGHT, *NEXT, *call("get_weather")])
    for stop in range(len(ids)):
        found = replies.parse(ids[:stop] or [5], 1, ReplyOptions(TOOLS))
        for given in found.calls:
            assert given.name == "get_weather" and ARGUMENTS.startswith(given.arguments.rstrip("\ufffd"))


def test_the_name_of_a_further_call_that_is_cut_off_is_left_out(replies: Replies) -> None:
    first = [*call("f", "{}"), *NEXT]
    for stop in range(1, len(call("get_weather")) - 3):
        found = replies.parse(ids_of([*first, *call("get_weather")[:stop]]), 1, ReplyOptions(TOOLS))
        assert (found.text, [given.name for given in found.calls]) == ("", ["f"])


def test_without_tools_and_one_call_only(replies: Replies) -> None:
    ids = ids_of([*call("get_weather")[:-1], END, *NEXT, *call("f", "{}")])
    found = replies.parse(ids, 1, ReplyOptions())
    assert (found.text, found.reasoning, tuple(found.calls)) == ("", ARGUMENTS + "{}", ())
    found = replies.parse(ids, 1, ReplyOptions(TOOLS, parallel=False))
    assert [(given.name, given.arguments) for given in found.calls] == [W]
