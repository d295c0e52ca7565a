"""Requests with a timeout: in the queue, in the middle of their output, in streams; and bad ones."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from atom.shared.messages.grammar import CompiledGrammar, GrammarSource
from frontend.text.grammar_process import Compilation, GrammarProcess
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import error_of

TOKENIZER = tiny_tokenizer.tokenizer()
STEP_S = 0.01
SOME_S = 2.5
"""Time for some tokens, also if this process stands still for two seconds, and for few of 10,000."""


def script(request: AddRequest) -> Script:
    prompt = TOKENIZER.decode(unpack_ids(request.prompt_ids))
    if "queue" in prompt or (request.sampling.sequence and "half" in prompt):
        return Script([], reason=None)
    return Script([70] * (3 if "short" in prompt else 10_000), FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script, step_s=STEP_S, max_model_len=20_000) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with running_frontend(core, checkpoint) as client:
        yield client


def ids_of_the_last_request(core: FakeCore) -> set[int]:
    last = core.requests[-1].request_ids[0]
    return {last}


@pytest.mark.parametrize("header", [False, True])
def test_a_request_without_a_token_is_a_408(client: Client, core: FakeCore, header: bool) -> None:
    body, headers = {"prompt": "queue", "timeout": 0.1}, {}
    if header:
        body, headers = {"prompt": "queue"}, {"X-Request-Timeout": "0.1"}
    begun = time.monotonic()
    status, data, received = client.exchange("POST", "/v1/completions", body, headers=headers)
    assert 0.1 <= time.monotonic() - begun < DEADLINE_S
    error = error_of(data)
    assert (status, error["code"], error["param"]) == (408, "timeout", "timeout")
    assert received["x-should-retry"] == "false"
    core.wait_for(lambda: ids_of_the_last_request(core) <= set(core.aborted))
    (request_id,) = ids_of_the_last_request(core)
    assert core.abort_reasons[request_id] is FinishReason.TIMEOUT


def test_what_was_generated_is_returned(client: Client, core: FakeCore) -> None:
    status, response = client.post("/v1/completions", prompt="x", max_tokens=10_000, timeout=SOME_S)
    (choice,) = response["choices"]
    assert (status, choice["finish_reason"], choice["raw_finish_reason"]) == (200, "length", "timeout")
    tokens = response["usage"]["completion_tokens"]
    assert 1 < tokens < 10_000 and len(choice["text"]) == tokens
    core.wait_for(lambda: ids_of_the_last_request(core) <= set(core.aborted))


def test_a_grammar_that_is_being_compiled(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped with the request that it was for."""
    is_cancelled = threading.Event()

    def compile_slowly(
        process: GrammarProcess, source: GrammarSource, compilation: Compilation
    ) -> tuple[CompiledGrammar, bool]:
        deadline = time.monotonic() + DEADLINE_S
        while not compilation.is_cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        is_cancelled.set()
        return CompiledGrammar(error="too late"), True

    monkeypatch.setattr(GrammarProcess, "compile", compile_slowly)
    body = {"prompt": "x", "guided_regex": "a", "timeout": 0.1}
    status, response = client.post("/v1/completions", **body)
    assert (status, response["error"]["code"]) == (408, "timeout")
    assert is_cancelled.wait(DEADLINE_S)


def test_held_back_text_is_part_of_it(client: Client) -> None:
    text = TOKENIZER.decode([70])
    stop = text * 20 + "x"
    _, response = client.post("/v1/completions", prompt="x", max_tokens=10_000, timeout=SOME_S, stop=stop)
    assert len(response["choices"][0]["text"]) == response["usage"]["completion_tokens"] > 1


def test_choices_without_tokens_end_too(client: Client) -> None:
    _, response = client.post("/v1/completions", prompt="half", n=2, max_tokens=10_000, timeout=SOME_S)
    first, second = response["choices"]
    assert first["text"] and not second["text"]
    assert first["raw_finish_reason"] == second["raw_finish_reason"] == "timeout"


def test_streams(client: Client) -> None:
    events = client.events("/v1/completions", prompt="x", max_tokens=10_000, timeout=SOME_S)
    assert len(events) > 2
    assert events[-1]["choices"][0]["raw_finish_reason"] == "timeout"
    (event,) = client.events("/v1/completions", prompt="queue", timeout=0.1)
    assert event["error"]["code"] == "timeout"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10_000}
    events = client.events("/v1/chat/completions", **chat, timeout=SOME_S)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_request_that_ends_in_time_is_not_affected(client: Client, core: FakeCore) -> None:
    core.requests.clear()
    for _ in range(3):
        status, response = client.post("/v1/completions", prompt="short", timeout=3.0)
        assert (status, response["choices"][0]["raw_finish_reason"]) == (200, "max_tokens")
    time.sleep(3.1)
    assert not {request.request_ids[0] for request in core.requests} & set(core.aborted)


@pytest.mark.parametrize("value", [0, -1, 1e9, "1", [], True])
def test_bad_timeouts(client: Client, value: Any) -> None:
    status, response = client.post("/v1/completions", prompt="x", timeout=value)
    assert (status, response["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("value", ["", "soon", "-1", "1e3", "nan", "9999999", "1s", "0"])
def test_bad_headers(client: Client, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    status, data, _ = client.exchange("POST", "/v1/completions", {"prompt": "x"}, headers=headers)
    assert status == 400 and "timeout" in error_of(data)["param"].lower()


def test_the_field_takes_precedence(client: Client) -> None:
    body, headers = {"prompt": "short", "timeout": 60}, {"X-Request-Timeout": "0.001"}
    assert client.exchange("POST", "/v1/completions", body, headers=headers)[0] == 200
