"""The official client against the real app."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from atom.shared.config.model import ModelConfig
from atom.shared.messages.engine import FinishReason
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script, logprob
from tests.helpers.servers.http_server import DEADLINE_S, MODEL, running_frontend

OUTPUT = "Hello world, 你好"


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("sdk")
    checkpoint = tiny_tokenizer.checkpoint(directory)
    ids = tiny_tokenizer.tokenizer().encode(OUTPUT, add_special_tokens=False)
    core = FakeCore(directory, lambda _: Script([*ids, 1], FinishReason.EOS, 1))
    with core, running_frontend(core, checkpoint) as client, _sdk(client.base_url) as sdk:
        yield sdk


def _sdk(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", timeout=DEADLINE_S, max_retries=0)


def test_chat(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, user="me", extra_body={"top_k": 5}
    )
    assert [choice.message.content for choice in reply.choices] == [OUTPUT, OUTPUT]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None


def test_chat_stream(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == OUTPUT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_completion(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(model=MODEL, prompt=["a", "b"], stop=["wor"])
    assert [choice.text for choice in reply.choices] == ["Hello ", "Hello "]


def test_completion_stream(sdk: openai.OpenAI) -> None:
    with sdk.completions.create(model=MODEL, prompt="a", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == OUTPUT


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "atom"


def test_chat_logprobs(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3, n=2
    )
    for choice in reply.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content
        assert entries is not None
        read = b"".join(bytes(entry.bytes or ()) for entry in entries[:-1])
        assert read.decode() == choice.message.content == OUTPUT
        assert entries[-1].token == "</s>"
        for entry in entries:
            assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5, -0.75]
            assert entry.logprob in (-0.25, -0.5)


def test_chat_stream_logprobs(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, stream=True
    ) as stream:
        chunks = [choice for chunk in stream for choice in chunk.choices]
    for choice in chunks[:-1]:  # every piece brings the log probabilities of just its tokens
        entries = (choice.logprobs.content if choice.logprobs else None) or []
        read = b"".join(bytes(entry.bytes or ()) for entry in entries)
        assert read.decode() == choice.delta.content
    assert chunks[-1].finish_reason == "stop"


def test_completion_logprobs(sdk: openai.OpenAI) -> None:
    (choice,) = sdk.completions.create(model=MODEL, prompt="a", logprobs=2).choices
    columns = choice.logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.top_logprobs is not None
    assert columns.token_logprobs is not None
    assert columns.text_offset is not None
    for token, value, top, offset in zip(
        columns.tokens, columns.token_logprobs, columns.top_logprobs, columns.text_offset, strict=True
    ):
        assert top[token] == value or token == "\ufffd"
        assert choice.text[offset:].startswith(token) or token in ("\ufffd", "</s>")


def test_echo_scores_a_prompt(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(
        model=MODEL, prompt=[[40, 41, 42], [43, 44]], echo=True, logprobs=1, max_tokens=0
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    for choice, ids in zip(reply.choices, ([40, 41, 42], [43, 44]), strict=True):
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs == [None, *(logprob(token_id) for token_id in ids[1:])]


def test_errors_arrive_as_the_sdks_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=MODEL, prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_what_needs_another_kind_of_model_is_refused_by_name(sdk: openai.OpenAI) -> None:
    calls = (
        lambda: sdk.embeddings.create(model=MODEL, input="x"),
        lambda: sdk.images.generate(model=MODEL, prompt="x"),
        lambda: sdk.audio.speech.create(model=MODEL, input="x", voice="alloy"),
        lambda: sdk.batches.list(),
        lambda: sdk.post("/rerank", cast_to=object, body={"query": "x"}),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "unsupported_route" and "this server" in caught.value.message


def test_several_names_of_the_model(tmp_path: Path) -> None:
    core = FakeCore(tmp_path, lambda _: Script([70]))
    model = ModelConfig(model=MODEL, served_model_name="first,org/second")
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    with core, running_frontend(core, checkpoint, model=model) as client, _sdk(client.base_url) as sdk:
        assert [card.id for card in sdk.models.list()] == ["first", "org/second"]
        assert sdk.models.retrieve("org/second").id == "org/second"
        assert sdk.completions.create(model="org/second", prompt="a").model == "org/second"
        assert client.post("/v1/completions", prompt="a")[1]["model"] == "first"
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model=MODEL, prompt="a")
