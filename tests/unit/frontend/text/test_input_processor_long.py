"""Bounds come before work: what is refused was not tokenized, and shared work is done once."""

import json
from pathlib import Path
from typing import Any

import pytest

from atom.shared.sampling_params import SamplingParams
from frontend.errors import RequestError
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor
from frontend.text.tokenizer import Tokenizer, TooManyTokensError
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore
from tests.helpers.servers.http_server import running_frontend
from tests.helpers.servers.rig import script

CHUNK = 64 * 1024


class Recorder:
    """A backend that counts the characters and calls of each method."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.characters = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name == "encode_batch_fast":
                self.characters += len(args[0][0])
            return method(*args, **kwargs)

        return call


def recorded() -> tuple[Tokenizer, Recorder]:
    tokenizer = tiny_tokenizer.tokenizer()
    recorder = Recorder(tokenizer._backend)
    tokenizer._backend = recorder  # type: ignore[assignment]
    return tokenizer, recorder


def processor(directory: Path, tokenizer: Tokenizer, max_model_len: int = 100) -> InputProcessor:
    return InputProcessor(tiny_tokenizer.checkpoint(directory), tokenizer, max_model_len, "fcfs")


def test_only_calls_that_release_the_gil_are_used() -> None:
    tokenizer, recorder = recorded()
    tokenizer.decode(tokenizer.encode("Hello"))
    tokenizer.token_text(300)
    assert set(recorder.calls) <= {"encode_batch_fast", "decode_batch", "id_to_token"}


def test_a_text_that_is_much_too_long_is_refused_by_its_first_chunk(tmp_path: Path) -> None:
    tokenizer, recorder = recorded()
    with pytest.raises(RequestError, match="alone has more than 100: shorten it to at most 99") as caught:
        processor(tmp_path, tokenizer).encode("7" * (30 << 20))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert recorder.characters <= CHUNK


def test_a_text_that_is_a_little_too_long_is_counted_exactly(tmp_path: Path) -> None:
    tokenizer, _ = recorded()
    with pytest.raises(RequestError, match="alone has 101: shorten"):
        processor(tmp_path, tokenizer).encode("7" * 101, add_special_tokens=False)
    assert processor(tmp_path, tokenizer).encode("7" * 100, add_special_tokens=False)


def test_a_long_text_of_few_tokens_is_encoded_whole() -> None:
    # One token has 64 characters: far more than the number from which texts are counted first.
    backend = tiny_tokenizer.build([" " * 64])
    tokenizer = Tokenizer(backend)
    text = " " * 64 * 4096
    ids = tokenizer.encode(text, max_tokens=4096)
    assert ids == backend.encode(text).ids
    assert len(ids) == 4096
    with pytest.raises(TooManyTokensError):
        tokenizer.encode(text, max_tokens=2048)


def test_texts_to_be_truncated_may_exceed_the_context_by_a_bounded_amount(tmp_path: Path) -> None:
    tokenizer, recorder = recorded()
    inputs = processor(tmp_path, tokenizer)
    assert len(inputs.encode("7" * 10_000, excess=MAX_EXCESS_TOKENS)) == 10_000
    recorder.characters = 0
    with pytest.raises(RequestError, match=f"more than {100 + MAX_EXCESS_TOKENS} tokens"):
        inputs.encode("7" * (30 << 20), excess=MAX_EXCESS_TOKENS)
    assert recorder.characters <= 1.25 * (100 + MAX_EXCESS_TOKENS) + 2 * CHUNK


def test_too_many_prompts_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda *_args, **_kwargs: work.append("encode"))
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda _: work.append("params"))
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    with FakeCore(tmp_path, script, max_model_len=100) as core, running_frontend(core, checkpoint) as client:
        for prompts, n in ((["a"] * 60_000, 1), ([[3]] * 513, 2)):
            body = json.dumps({"prompt": prompts, "n": n}).encode()
            status, response = client.call("POST", "/v1/completions", raw=body)
            assert (status, response["error"]["param"]) == (400, "n")
    assert work == []


def test_all_prompts_share_the_work_on_their_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    encoded: list[str] = []
    check, encode = SamplingParams.__post_init__, Tokenizer.encode

    def counted_check(params: SamplingParams) -> None:
        checked.append(params.max_tokens)
        check(params)

    def counted_encode(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted_check)
    monkeypatch.setattr(Tokenizer, "encode", counted_encode)
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    with FakeCore(tmp_path, script, max_model_len=100) as core, running_frontend(core, checkpoint) as client:
        # Without max_tokens each prompt has another limit: what fits after it.
        status, response = client.post(
            "/v1/completions", prompt=[[3] * length for length in range(1, 21)], bad_words=["fox"]
        )
    assert status == 200, response
    assert len(response["choices"]) == 20
    assert checked == [80]
    assert sorted(text for text in encoded if "fox" in text) == [" fox", "fox"]
    limits = sorted(request.max_tokens for request in core.requests)
    assert limits == list(range(80, 100))


def test_bad_words_of_all_sequences_are_bounded(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    words = ["7" * 200 + str(number) for number in range(250)]
    with FakeCore(tmp_path, script, max_model_len=100) as core, running_frontend(core, checkpoint) as client:
        status, response = client.post("/v1/completions", prompt=[[3]] * 100, bad_words=words)
        assert (status, response["error"]["param"]) == (400, "bad_words")
        assert core.requests == []
        assert client.post("/v1/completions", prompt=[3], bad_words=words)[0] == 200


def test_more_messages_than_tokens_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    messages = [{"role": "user", "content": "a"}] * 101
    with FakeCore(tmp_path, script, max_model_len=100) as core, running_frontend(core, checkpoint) as client:
        status, response = client.post("/v1/chat/completions", messages=messages)
    assert (status, response["error"]["param"]) == (400, "messages")
    assert response["error"]["code"] == "context_length_exceeded"
    assert response["error"]["message"].startswith("101 messages do not fit")
