"""Log probabilities belong to the text that they come with, however it is cut into pieces."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest

from tests.helpers.servers.fake_core import likely, logprob
from tests.helpers.servers.rig import EOS, OUTPUT, TOKENIZER, Rig, running_rig

IDS = TOKENIZER.encode(OUTPUT, add_special_tokens=False)
ONE_BY_ONE = {"chat": {"logprobs": True, "top_logprobs": 2}, "completions": {"logprobs": 2}}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running_rig(tmp_path_factory.mktemp("rig")) as rig:
        yield rig


def columns(rig: Rig, **fields: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = rig.run("completions", **fields).choice["logprobs"]
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns of a stream, put together."""
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_columns(rig: Rig) -> None:
    found = columns(rig, logprobs=2)
    assert found["tokens"] == [TOKENIZER.token_text(i) for i in [*IDS, EOS]]
    assert found["token_logprobs"] == [logprob(i) for i in [*IDS, EOS]]
    for token_id, top in zip(IDS, found["top_logprobs"], strict=False):
        expected = {TOKENIZER.token_text(i): value for i, value in reversed(likely(token_id, 2))}
        assert top == expected
    # The special token and the parts of one character begin where the next text does.
    text = OUTPUT.replace("<s>", "")
    starts = [text.index(piece) for piece in ("He", "llo")]
    assert found["text_offset"][:2] == starts
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][-1] == len(text)


@pytest.mark.parametrize("count", [0, 1])
def test_the_token_itself_is_always_there(rig: Rig, count: int) -> None:
    found = columns(rig, logprobs=count, return_tokens_as_token_ids=True)
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert 1 <= len(top) <= count + 1


def test_tokens_by_their_ids(rig: Rig) -> None:
    found = columns(rig, logprobs=1, return_tokens_as_token_ids=True)
    assert found["tokens"] == [f"token_id:{i}" for i in [*IDS, EOS]]
    assert all(key.startswith("token_id:") for top in found["top_logprobs"] for key in top)


@pytest.mark.parametrize("fields", [{}, {"stop": "rl"}, {"stop": "好"}, {"echo": True}, {"max_tokens": 12}])
def test_streams_have_the_same_logprobs_as_whole_responses(rig: Rig, fields: dict[str, Any]) -> None:
    whole = rig.run("completions", logprobs=2, **fields).choice
    events = rig.run("completions", logprobs=2, stream=True, **fields).events
    assert joined(events) == whole["logprobs"]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]


@pytest.mark.parametrize("stop", [None, "world, 你x", "llo wo", "zzz"])
def test_every_chunk_has_the_tokens_of_its_text(rig: Rig, stop: str | None) -> None:
    events = rig.run("completions", logprobs=0, stream=True, skip_special_tokens=False, stop=stop).events
    shown = 0
    for event in events[:-1]:
        (choice,) = event["choices"]
        offsets = choice["logprobs"]["text_offset"] if choice["logprobs"] else []
        assert all(shown <= offset < shown + len(choice["text"]) for offset in offsets)
        shown += len(choice["text"])


def test_tokens_after_a_stop_string_are_not_returned(rig: Rig) -> None:
    found = columns(rig, logprobs=0, stop="lo")
    assert found["tokens"] == ["He", "llo"]  # those of the stop string itself stay, as in vLLM


def test_chat_returns_bytes(rig: Rig) -> None:
    content = rig.run("chat", logprobs=True, top_logprobs=1).choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [logprob(i) for i in [*IDS, EOS]]
    parts = [bytes(entry["bytes"]) for entry in content if "\ufffd" in entry["token"]]
    assert parts
    assert b"".join(bytes(entry["bytes"]) for entry in content) == (OUTPUT + "</s>").encode()
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(content)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_scores(rig: Rig, stream: bool) -> None:
    ran = rig.run("completions", prompt="one", echo=True, stream=stream)
    text = "".join(e["choices"][0]["text"] for e in ran.events) if stream else ran.text
    assert text == "one" + OUTPUT.replace("<s>", "")


def test_echoed_ids_are_decoded(rig: Rig) -> None:
    ids = TOKENIZER.encode("one two", add_special_tokens=False)
    assert rig.run("completions", prompt=ids, echo=True).text.startswith("one two")
    cut = rig.run("completions", prompt="one two", echo=True, truncate_prompt_tokens=1)
    assert cut.text.startswith(TOKENIZER.decode(ids[-1:]) + "Hello")


def test_echoed_columns_cover_prompt_and_output(rig: Rig) -> None:
    found = columns(rig, prompt="one 你", echo=True, logprobs=1, max_tokens=2)
    ids = TOKENIZER.encode("one 你", add_special_tokens=False)
    assert found["tokens"] == [TOKENIZER.token_text(i) for i in [*ids, *IDS[:2]]]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == [logprob(i) for i in [*ids[1:], *IDS[:2]]]
    assert found["text_offset"][-2:] == [len("one 你"), len("one 你He")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_0_returns_no_token(rig: Rig, stream: bool, limit: str) -> None:
    fields = {limit: 0, "echo": True, "logprobs": 1, "return_token_ids": True, "n": 2}
    ran = rig.run("completions", prompt="one two", stream=stream, **fields)
    choices = [choice for event in ran.events or [ran.response] for choice in event["choices"]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "one two"
        assert [i for choice in mine for i in choice["token_ids"]] == []
        assert mine[-1]["finish_reason"] == "length"
    assert ran.sent.max_tokens == 1
    if not stream:
        assert ran.response["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_have_ranks(rig: Rig, endpoint: str) -> None:
    ran = rig.run(endpoint, prompt_logprobs=1, **({} if endpoint == "chat" else {"prompt": [40, 41]}))
    found = (ran.response if endpoint == "chat" else ran.choice)["prompt_logprobs"]
    assert found[0] is None
    if endpoint == "completions":
        name = TOKENIZER.token_text
        assert found[1:] == [
            {
                "41": {"logprob": -0.5, "rank": 2, "decoded_token": name(41)},
                "42": {"logprob": -0.25, "rank": 1, "decoded_token": name(42)},
            }
        ]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_fewer_are_shown_than_another_field_needs(rig: Rig, endpoint: str) -> None:
    ran = rig.run(endpoint, prompt_logprobs=0, **ONE_BY_ONE[endpoint], echo=True)
    found = (ran.response if endpoint == "chat" else ran.choice)["prompt_logprobs"]
    assert all(len(entry) == 1 for entry in found[1:])
    assert ran.sent.prompt_logprobs == (2 if endpoint == "completions" else 0)


def test_without_a_tokenizer_tokens_go_by_their_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("bare")
    with running_rig(directory, tokenizer_file=None, chat_template_file=None) as rig:
        for stream in (False, True):
            ran = rig.run("completions", prompt=[40, 41], logprobs=1, prompt_logprobs=None, stream=stream)
            found = joined(ran.events) if stream else ran.choice["logprobs"]
            assert found["tokens"] == [f"token_id:{i}" for i in [*IDS, EOS]]
        found = rig.run("completions", prompt=[40, 41], prompt_logprobs=0).choice["prompt_logprobs"]
        assert found[1]["41"]["decoded_token"] is None
        assert rig.refused("completions", prompt=[40], echo=True)["param"] == "echo"
        assert rig.refused("completions", prompt=[40], bad_words=["x"])["param"] == "bad_words"


def test_what_an_evaluation_harness_reads(rig: Rig) -> None:
    """As lm-eval's local-completions scores continuations: a batch of ids, echoed, one token more."""
    prompts = [[40, 42, 44, 46], [41, 43, 45]]
    lengths = [2, 1]  # of the contexts; the other tokens get log probabilities
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = sorted(rig.run("completions", **body).response["choices"], key=itemgetter("index"))
    for choice, prompt, length in zip(choices, prompts, lengths, strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        tops = choice["logprobs"]["top_logprobs"]
        assert scores[length:-1] == [logprob(i) for i in prompt[length:]]
        greedy = all(
            score == max(top.values()) for score, top in zip(scores[length:-1], tops[length:-1], strict=True)
        )
        assert greedy == all(i % 2 == 0 for i in prompt[length:])
