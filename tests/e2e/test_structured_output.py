"""Structured output of a model of random weights: whatever it prefers, a finished output is valid.

The server splits prompts into chunks, preempts for lack of blocks and speculates, and requests have several
choices.
"""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.helpers.servers.random_server import ARGS, write_checkpoint, write_tools_checkpoint
from tests.helpers.servers.server import Server, running_server
from tests.helpers.text.json_schemas import is_valid, random_schema

pytestmark = pytest.mark.timeout(300)

_AT_ONCE = 16
_MAX_TOKENS = 400
_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--num-kv-blocks", "150")
_DRAFTS = ("--method", "ngram", "--num-speculative-tokens", "3", "--no-spec-decode-adaptive")
"""However long drafts take here, their number does not depend on it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_tools_checkpoint(tmp_path_factory.mktemp("model") / "model", **small)
    with running_server("--model", str(directory), *ARGS, *_LIMITS, *_DRAFTS) as running:
        yield running


class Client:
    """Sends completion requests, some at a time."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def choices(self, **fields: Any) -> list[dict[str, Any]]:
        """The choices of a request that must succeed; of a conversation if it has messages."""
        status, content = await self.post(**fields)
        assert status == 200, (content, fields)
        choices: list[dict[str, Any]] = content["choices"]
        return choices

    async def post(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """The status and content of a response."""
        body = {"temperature": 2, "max_tokens": _MAX_TOKENS, **fields}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if "messages" not in body:
            body["prompt"] = "one two three " * 9
        async with self._slots, self._session.post(path, json=body) as answer:
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def client(server: Server) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=800)) as session:
        yield Client(session)


async def _finished_outputs(server: Server, schemas: list[dict[str, Any]]) -> float:
    """Generate for each schema; checks all outputs, and returns how many were finished."""
    async with client(server) as sender:

        async def check(seed: int, schema: dict[str, Any]) -> float:
            response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            choices = await sender.choices(response_format=response_format, seed=seed, n=1 + seed % 2)
            finished = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
            for text in finished:
                assert is_valid(json.loads(text), schema), (text, schema)
            return len(finished) / len(choices)

        return sum(await asyncio.gather(*(check(*one) for one in enumerate(schemas))))


def _schemas(count: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [random_schema(draw) for _ in range(count)]


def test_finished_outputs_are_valid(server: Server) -> None:
    assert asyncio.run(_finished_outputs(server, _schemas(20))) > 15


def test_messages_follow_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    body = {
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "one two"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }

    async def run() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/messages", json=body) as answer,
        ):
            return answer.status, await answer.json()

    status, message = asyncio.run(run())
    assert status == 200, message
    assert message["stop_reason"] == "max_tokens" or is_valid(
        json.loads(message["content"][0]["text"]), schema
    )


TAG = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ">"}
KINDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}}, re.compile("[a-c]{2}-[0-9]{3}").fullmatch),
    ({"guided_choice": ["red", 'gr"een', "blau"]}, {"red", 'gr"een', "blau"}.__contains__),
    (
        {"guided_grammar": 'root ::= "(" root ")" | "x"', "logit_bias": {"10": 1}},
        re.compile(r"\(*x\)*").fullmatch,
    ),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, "null".__eq__),
    ({"guided_json": {"enum": [7]}, "logprobs": 2}, "7".__eq__),
    ({"guided_json": {"type": "string", "pattern": "^(?!.*b)[ab]{6}$"}}, '"aaaaaa"'.__eq__),
    (
        {
            "response_format": {"type": "structural_tag", "format": TAG},
        },
        re.compile("<[0-9]>").fullmatch,
    ),
]
_REQUIRED = {"type": "object", "required": ["a"]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "", "foo"),
    ({"guided_regex": "(a"}, "", "parenthesis"),
    ({"guided_grammar": "root ::= other"}, "", "other"),
    ({"guided_json": {"not": {}}}, "", "'not'"),
    ({"guided_json": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}}, "", "#/$defs/A"),
    ({"guided_json": _REQUIRED | {"properties": {"a": {"anyOf": []}}}}, "", "#/properties/a"),
    ({"guided_json": _REQUIRED | {"properties": {"a": {"$ref": "#/properties/a"}}}}, "", "#/properties/a"),
    ({"guided_json": {"type": "string", "pattern": "(?<!a)b"}}, "", "lookbehind '(?<!'"),
    ({"guided_regex": "a\\b"}, "", "word boundary"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "send one"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "", "exactly one"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
]


def test_every_kind_of_constraint(server: Server) -> None:
    async def drive() -> None:
        async with client(server) as sender:
            fields = [kind for kind, _ in KINDS]
            outputs = await asyncio.gather(*(sender.choices(n=2, max_tokens=60, **kind) for kind in fields))
        for (kind, is_right), choices in zip(KINDS, outputs, strict=True):
            for choice in choices:
                assert choice["finish_reason"] == "length" or is_right(choice["text"]), (kind, choice)

    asyncio.run(drive())


def test_bad_constraints_cost_their_request_alone(server: Server) -> None:
    async def drive() -> None:
        async with client(server) as sender:
            answers = await asyncio.gather(*(sender.post(**fields) for fields, _, _ in BAD))
            status, content = await sender.post(structured_outputs={"choice": ["a"]}, allowed_token_ids=[5])
            assert (status, content["error"]["type"]) == (400, "invalid_request_error")
            assert "allowed_token_ids" in content["error"]["message"]
            assert (await sender.choices(guided_choice=["a"]))[0]["text"] == "a"
        for (fields, param, names), (status, content) in zip(BAD, answers, strict=True):
            assert status == 400, content
            assert content["error"]["param"] == (param or next(iter(fields)))
            assert names in content["error"]["message"]

    asyncio.run(drive())


LOOK = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 99}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait", "parameters": {"not": {}}}},
]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


def test_required_and_named_calls(server: Server) -> None:
    named = {"type": "function", "function": {"name": "look"}}

    async def drive() -> None:
        async with client(server) as sender:
            one = ASKED | {"parallel_tool_calls": False}
            required = await sender.choices(**one, tool_choice="required", n=2)
            chosen = await sender.choices(**ASKED, tool_choice=named, n=2)
            _, answer = await sender.post(**one, tool_choice="required", max_tokens=1)
            assert "'wait'" in answer["warnings"][0] and "'not'" in answer["warnings"][0]
            status, content = await sender.post(
                **ASKED, tool_choice={"type": "function", "function": {"name": "x"}}
            )
            assert (status, content["error"]["param"]) == (400, "tool_choice")
        for choice in [*required, *chosen]:
            if choice["finish_reason"] == "length":
                continue
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert choice["message"]["content"] is None
            assert call["function"]["name"] != "look" or is_valid(arguments, LOOK)
        calls = [call for choice in chosen for call in choice["message"].get("tool_calls", ())]
        assert {call["function"]["name"] for call in calls} <= {"look"}

    asyncio.run(drive())


@pytest.mark.slow
def test_a_source_that_takes_too_long_is_refused_and_delays_no_other(server: Server) -> None:
    endless = {"enum": [f"value {i * 7919}" for i in range(25000)]}

    async def drive() -> None:
        async with client(server) as sender:
            refused = asyncio.create_task(sender.post(guided_json=endless))
            for _ in range(20):
                assert (await sender.choices(guided_choice=["a"]))[0]["text"] == "a"
            assert not refused.done()
            status, content = await refused
            # Next to other programs it may get less CPU time than it is allowed.
            expected = {400: "takes more than 10 s of CPU time", 429: "the machine is busy"}
            assert expected[status] in content["error"]["message"]
            assert "guided_json" in content["error"]["message"]

    asyncio.run(drive())


async def _tokens_per_step(
    drafting: Server, plain: Server, schemas: list[dict[str, Any]], predicts: bool = True
) -> float:
    """Greedy outputs, first without drafts, then with drafts; with `predicts` that text is the prediction.

    Checks that they are equal; returns the mean number of tokens of a sequence in a step with drafts.
    """
    tokens = accepted = 0
    async with client(drafting) as sender, client(plain) as plain_sender:
        for schema in schemas:
            fields = {"guided_json": schema, "temperature": 0, "max_tokens": 60}
            text = (await plain_sender.choices(**fields))[0]["text"]
            is_predicted = predicts and text
            prediction = {"prediction": {"type": "content", "content": text}} if is_predicted else {}
            status, content = await sender.post(**fields, **prediction)
            assert status == 200, content
            assert content["choices"][0]["text"] == text, schema
            usage = content["usage"]
            tokens += usage["completion_tokens"]
            accepted += usage.get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
    return tokens / (tokens - accepted)


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As `server`, without drafts."""
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path_factory.mktemp("plain") / "model", **small)
    with running_server("--model", str(directory), *ARGS, *_LIMITS) as running:
        yield running


def test_drafts_change_no_structured_output(server: Server, plain_server: Server) -> None:
    assert asyncio.run(_tokens_per_step(server, plain_server, _schemas(12))) > 1.3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drafts_change_no_output_of_300_schemas(server: Server, plain_server: Server) -> None:
    assert asyncio.run(_tokens_per_step(server, plain_server, _schemas(300))) > 1.3


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_draft_model_changes_no_output_of_300_schemas(plain_server: Server, tmp_path: Path) -> None:
    """It drafts as the model does, and knows no grammar."""
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    model = str(write_checkpoint(tmp_path / "model", **small))
    drafts = ("--method", "draft_model", "--num-speculative-tokens", "3", "--draft-model", model)
    drafts += ("--no-spec-decode-adaptive",)  # it is as slow as the model
    with running_server("--model", model, *ARGS, *_LIMITS, *drafts) as drafting:
        found = _tokens_per_step(drafting, plain_server, _schemas(300), predicts=False)
        assert asyncio.run(found) > 1.01


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finished_outputs_of_500_schemas_are_valid(server: Server) -> None:
    assert asyncio.run(_finished_outputs(server, _schemas(500))) > 400


def test_two_ranks_follow_a_grammar(tmp_path: Path) -> None:
    """The first has the grammars, and the second its masks."""
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path / "model", **small)
    fields = {"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}, "seed": 5, "n": 4, "max_tokens": 60}

    async def texts(at: Server) -> list[str]:
        async with client(at) as sender:
            return [choice["text"] for choice in await sender.choices(**fields)]

    with running_server("--model", str(directory), *ARGS, *_LIMITS, "-tp", "2") as ranks:
        found = asyncio.run(texts(ranks))
    assert all(re.fullmatch("[a-c]{2}-[0-9]{3}", text) for text in found), found


_COMPILER = "workers.grammar.compile_process"
_VICTIMS = ("workers.main", _COMPILER, "engine_core.process", "workers.grammar.matcher_process")


def _large(number: int) -> dict[str, Any]:
    """A request whose grammar is like no other one, and takes a second to compile."""
    items = {"type": "array", "minItems": 40, "items": {"enum": ["x", f"y{number}"]}}
    others = {f"p{number}-{index}": {"type": "string", "maxLength": 5} for index in range(1500)}
    schema = {"type": "object", "properties": {"a": items, **others}, "required": ["a"]}
    return {"guided_json": schema, "seed": number, "max_tokens": 100}


async def _killed(server: Server, sender: Client, victim: str, first: int) -> None:
    """One client leaves as a process is killed; the others get the outputs of an undisturbed run."""
    requests = [_large(first + index) for index in range(6)]
    asked = [asyncio.create_task(sender.post(**each)) for each in requests]
    found: list[psutil.Process] = []
    async with asyncio.timeout(120):
        while not found:
            await asyncio.sleep(0.5)
            for each in psutil.Process(server.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [each] if victim in " ".join(each.cmdline()) else []
    assert not all(each.done() for each in asked)
    asked.pop(0).cancel()
    found[0].kill()
    responses = await asyncio.gather(*asked)
    undisturbed = await asyncio.gather(*(sender.post(**each) for each in requests[1:]))
    for (status, content), (later, expected) in zip(responses, undisturbed, strict=True):
        assert later == 200, expected
        if status == 503 and victim == _COMPILER:
            assert "has ended: try again" in content["error"]["message"]
        else:
            assert status == 200, content
            assert content["choices"] == expected["choices"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["-tp", "-dp"])
def test_kills_amid_compilations_change_no_output(tmp_path: Path, layout: str) -> None:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path / "model", **small)

    async def run(server: Server) -> None:
        async with client(server) as sender:
            for round_number, victim in enumerate(_VICTIMS):
                await _killed(server, sender, victim, 10 * round_number)

    with running_server("--model", str(directory), *ARGS, layout, "2") as server:
        asyncio.run(run(server))
