"""Replies in harmony's channels: sorted by their tags, wherever steps cut them."""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.engine import AddRequest, Finished, FinishReason, Sampling, TokenDeltas, pack_ids
from frontend.text.output_processor import SequenceOutput, TextOptions
from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.choose import choose_format
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.engine.text_outputs import TextOutputs
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, MODEL, Client, running_frontend

TAGS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
PLAIN = tiny_tokenizer.build(TAGS)
PLAIN.encode_special_tokens = True
START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = (PLAIN.token_to_id(tag) for tag in TAGS)
Part = str | int
"""Text, in which a tag is nothing but text, or a tag's id."""


def message(header: str, text: str) -> list[Part]:
    return [START, "assistant", CHANNEL, header, MESSAGE, text, END]


THOUGHT, OUTPUT = "2 + 2 is 🦊", "Four, 你好 <|end|>"
# The prompt ends with the beginning of the first message.
REPLY = [*message("analysis", THOUGHT)[2:], *message("final", OUTPUT)[:-1]]
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}]}


def ids_of(parts: Sequence[Part]) -> list[int]:
    return [
        token_id
        for part in parts
        for token_id in (
            [part] if isinstance(part, int) else PLAIN.encode(part, add_special_tokens=False).ids
        )
    ]


def checkpoint_in(directory: Path, model_type: str = "gpt_oss") -> Checkpoint:
    return tiny_tokenizer.checkpoint(directory, TAGS, model_type=model_type, eos_token_ids=[RETURN, CALL])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint_in(tmp_path_factory.mktemp("harmony"))


class Replies:
    """Runs ids through the output processor."""

    def __init__(self, checkpoint: Checkpoint):
        self._tokenizer = Tokenizer.from_checkpoint(checkpoint)
        self._format = choose_format(checkpoint.model_type, self._tokenizer, None)

    def decode(
        self, ids: list[int], cuts: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> tuple[str, str, str | None]:
        """(content, reasoning, why it ended) of a choice whose steps end at `cuts`."""
        output = TextOutputs(self._tokenizer)
        request = AddRequest([1], pack_ids([5]), 1000, Sampling(0.0, 0, 1.0, 0.0, seed=1))
        found = self._format
        output.add(request, TextOptions(stops, reply=found and (lambda: found.parser(ReplyOptions()))))
        total = SequenceOutput(1, array("i"))
        borders = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
        for begin, end in itertools.pairwise(borders):
            ends = [Finished(1, FinishReason.MAX_TOKENS)] if end == len(ids) else []
            deltas = TokenDeltas(1, [1], pack_ids(ids[begin:end]), [end - begin], [], ends)
            for update in output.process(deltas).updates:
                total.merge(update)
        return total.text, total.reasoning, total.reason


@pytest.fixture(scope="module")
def replies(checkpoint: Checkpoint) -> Replies:
    return Replies(checkpoint)


@pytest.mark.parametrize(
    ("parts", "content", "reasoning"),
    [
        (REPLY, OUTPUT, THOUGHT),
        ([*REPLY, RETURN], OUTPUT, THOUGHT),
        (["plain words"], "plain words", ""),
        (["the rest", RETURN], "the rest", ""),
        ([CHANNEL, "analysis", MESSAGE, "cut"], "", "cut"),
        ([CHANNEL, "analysis"], "", ""),
        ([*message("analysis", "a"), *message("analysis", "b"), *message("final", "c")], "c", "ab"),
        (message("commentary", "I will look it up."), "I will look it up.", ""),
        ([CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE, "{}", CALL], "", "{}"),
        ([START, "assistant to=f", CHANNEL, "commentary", MESSAGE, "{}", CALL], "", "{}"),
        ([START, "assistant", MESSAGE, "no channel"], "no channel", ""),
        ([CHANNEL, "analyst", MESSAGE, "unknown"], "unknown", ""),
        ([MESSAGE, "no header"], "no header", ""),
        ([*message("analysis", "a"), "between ", *message("final", "b")], "between b", "a"),
        ([CHANNEL, "word " * 120, "and on"], "word " * 120 + "and on", ""),
    ],
)
def test_channels(replies: Replies, parts: list[Part], content: str, reasoning: str) -> None:
    ids = ids_of(parts)
    assert replies.decode(ids)[:2] == (content, reasoning)
    assert replies.decode(ids, cuts=range(len(ids)))[:2] == (content, reasoning)


TEXT = st.lists(st.sampled_from([*"ab 你🦊é\n", *TAGS]), max_size=12).map("".join)
MESSAGES = st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), TEXT), max_size=5)


@settings(deadline=None, max_examples=150)
@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 300), max_size=12))
def test_any_messages_in_any_steps(
    replies: Replies, messages: list[tuple[str, str]], cuts: list[int]
) -> None:
    parts = [part for channel, text in messages for part in message(channel, text)]
    content = "".join(text for channel, text in messages if channel != "analysis")
    reasoning = "".join(text for channel, text in messages if channel == "analysis")
    assert replies.decode(ids_of(parts), cuts)[:2] == (content, reasoning)


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, PLAIN.get_vocab_size() - 1), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 30), max_size=8),
)
def test_steps_make_no_difference_to_any_ids(replies: Replies, ids: list[int], cuts: list[int]) -> None:
    assert replies.decode(ids, cuts) == replies.decode(ids)


def test_stop_strings_are_sought_in_the_content_alone(replies: Replies) -> None:
    ids = ids_of(REPLY)
    assert replies.decode(ids, stops=["2 +", ", "]) == ("Four", THOUGHT, "stop_sequence")
    assert replies.decode(ids, stops=["analysis", "assistant"]) == (OUTPUT, THOUGHT, "max_tokens")
    # What may begin a stop string is held back beyond the end of the message.
    parts = [*message("final", "ab"), *message("analysis", "c"), *message("final", "d")]
    assert replies.decode(ids_of(parts), cuts=range(100), stops=["bx"]) == ("abd", "c", "max_tokens")


def test_other_models_reply_in_text(tmp_path: Path) -> None:
    replies = Replies(checkpoint_in(tmp_path, model_type="llama"))
    assert replies.decode(ids_of([CHANNEL, "analysis", MESSAGE, "a"]))[:2] == ("analysisa", "")


@pytest.fixture(scope="module")
def client(checkpoint: Checkpoint) -> Iterator[Client]:
    def script(request: AddRequest) -> Script:
        if request.max_tokens < 1000:
            return Script(ids_of(REPLY)[: request.max_tokens], FinishReason.MAX_TOKENS)
        return Script([*ids_of(REPLY), RETURN], FinishReason.EOS, RETURN, per_step=3)

    core = FakeCore(Path(checkpoint.directory), script)
    with core, running_frontend(core, checkpoint) as client:
        yield client


def test_the_official_client_reads_both(client: Client) -> None:
    with openai.OpenAI(base_url=client.base_url, api_key="none", timeout=DEADLINE_S, max_retries=0) as sdk:
        chat = sdk.chat.completions
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "2 + 2?"}]}
        choice = chat.create(**asked).choices[0]
        with chat.create(**asked, stream=True) as stream:
            deltas = [chunk.choices[0].delta for chunk in stream]
    assert (choice.message.content, choice.finish_reason) == (OUTPUT, "stop")
    for name in ("reasoning", "reasoning_content"):
        assert getattr(choice.message, name) == THOUGHT
        pieces = [getattr(delta, name, None) for delta in deltas]
        assert "".join(piece or "" for piece in pieces) == THOUGHT and len([p for p in pieces if p]) > 1
    contents = [delta.content or "" for delta in deltas]
    assert "".join(contents) == OUTPUT
    assert sum(1 for piece in contents if piece) > 1


def test_a_reply_that_was_cut_while_reasoning(client: Client) -> None:
    limit = len(ids_of(REPLY[:3])) + 4
    _, response = client.post("/v1/chat/completions", **CHAT, max_tokens=limit)
    reply = response["choices"][0]["message"]
    assert reply["content"] == "" and THOUGHT.startswith(reply["reasoning"]) and reply["reasoning"]
    events = client.events("/v1/chat/completions", **CHAT, max_tokens=limit)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == reply["reasoning"]
    assert not any(delta.get("content") for delta in deltas)


def test_details_go_with_reasoning_too(client: Client) -> None:
    """Every generated token has its log probability and its id, those of tags and headers included."""
    asked = {**CHAT, "logprobs": True, "return_token_ids": True}
    _, response = client.post("/v1/chat/completions", **asked)
    choices = [event["choices"][0] for event in client.events("/v1/chat/completions", **asked)]
    (whole,) = response["choices"]
    ids = [*ids_of(REPLY), RETURN]
    assert whole["token_ids"] == [token for choice in choices for token in choice.get("token_ids", ())] == ids
    entries = whole["logprobs"]["content"]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == streamed and len(entries) == len(ids)


def test_the_reply_as_the_model_wrote_it(client: Client) -> None:
    """On request, and where no messages were sent."""
    raw = "".join(part if isinstance(part, str) else TAGS[part - START] for part in REPLY)
    _, response = client.post("/v1/chat/completions", **CHAT, skip_special_tokens=False)
    assert response["choices"][0]["message"] == {"role": "assistant", "content": raw}
    fields = {"prompt": "2 + 2?", "max_tokens": 1000}
    _, response = client.post("/v1/completions", **fields, skip_special_tokens=False)
    assert response["choices"][0]["text"] == raw
    _, response = client.post("/v1/completions", **fields)
    assert response["choices"][0]["text"] == "".join(part for part in REPLY if isinstance(part, str))
