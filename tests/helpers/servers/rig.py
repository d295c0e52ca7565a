"""The app in front of a fake core, with the engine's requests and the responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atom.shared.messages.engine import AddRequest, FinishReason, LogitsProcessors, unpack_ids
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend

TOKENIZER = tiny_tokenizer.tokenizer()
EOS = 1
OUTPUT = "Hello <s>world, 你好🦊"
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% elif ponder %}</think>{% endif %}"
    + tiny_tokenizer.TEMPLATE
    + "{{ tone }}{{ reasoning_effort }}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THOUGHT = "<think>why</think>so"
CALLS = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>' * 2


@dataclass
class Ran:
    """One served request."""

    requests: list[AddRequest]
    response: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of a stream, whose first is `response`."""

    @property
    def sent(self) -> AddRequest:
        return self.requests[0]

    @property
    def processors(self) -> LogitsProcessors:
        return self.sent.sampling.logits_processors or LogitsProcessors()

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(unpack_ids(self.sent.prompt_ids), skip_special_tokens=False)

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.response["choices"][0]
        return choice

    @property
    def text(self) -> str:
        text: str = self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]
        return text


@dataclass
class Rig:
    """Sends requests to the app."""

    client: Client
    core: FakeCore

    def run(self, endpoint: str, **fields: Any) -> Ran:
        """Send a request that must succeed; None becomes null."""
        self.core.requests.clear()
        body = MINIMAL[endpoint] | fields
        if body.get("stream"):
            events = self.client.events(PATHS[endpoint], **body)
            return Ran(list(self.core.requests), events[0], events)
        status, response = self.client.post(PATHS[endpoint], **body)
        assert status == 200, response
        return Ran(list(self.core.requests), response)

    def refused(self, endpoint: str, **fields: Any) -> dict[str, Any]:
        """The error object of a request that must not reach the core."""
        self.core.requests.clear()
        status, response = self.client.post(PATHS[endpoint], **(MINIMAL[endpoint] | fields))
        assert status in (400, 404), response
        assert self.core.requests == []
        assert response["error"]["type"] == "invalid_request_error"
        error: dict[str, Any] = response["error"]
        return error


def script(request: AddRequest) -> Script:
    """OUTPUT, as far as the request's limit allows; calls of TOOL if it is in the prompt."""
    prompt = TOKENIZER.decode(unpack_ids(request.prompt_ids).tolist())
    output = CALLS if '"look"' in prompt else THOUGHT if "ponder" in prompt else OUTPUT
    ids = [*TOKENIZER.encode(output, add_special_tokens=False), EOS]
    if request.max_tokens < len(ids):
        return Script(ids[: request.max_tokens], FinishReason.MAX_TOKENS)
    return Script(ids, FinishReason.EOS, EOS)


@contextmanager
def running_rig(directory: Path, endless: int = -1, **checkpoint: Any) -> Iterator[Rig]:
    """A rig whose checkpoint has these fields; with max_tokens `endless` the output never ends.

    A rig whose bodies are drawn at random must have none: any constant of the sources is drawn some time.
    """

    def script_of(request: AddRequest) -> Script:
        made = script(request)
        return Script(made.ids[:-1], reason=None) if request.max_tokens == endless else made

    made = tiny_tokenizer.checkpoint(directory, max_model_len=10_000, **checkpoint)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with FakeCore(directory, script_of, max_model_len=10_000) as core, running_frontend(core, made) as client:
        yield Rig(client, core)


def body_of(endpoint: str, **fields: Any) -> bytes:
    return json.dumps(MINIMAL[endpoint] | fields).encode()
