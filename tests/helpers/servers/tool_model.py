"""A model that reasons and calls tools, served by the real frontend."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend

TAGS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# In the manner of Qwen3's: tools in the system turn, calls and results in tags, reasoning kept.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools><|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "Weather in Paris and 北京?"}
ARGUMENTS = ['{"city": "Paris"}', '{"city": "北京 \\"x\\""}']
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    for arguments in ARGUMENTS
)
REASONING, TEXT, ANSWER = "Two cities.", "Looking.\n", "It is sunny."
OUTPUT = f"<think>\n{REASONING}</think>\n\n{TEXT}{CALLS}"


@dataclass(frozen=True)
class ToolModel:
    """Calls the tools that it is offered, answers when it has their results, and writes JSON on demand."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    core: FakeCore

    def prompt(self) -> str:
        """The text of the last prompt."""
        ids = unpack_ids(self.core.requests[-1].prompt_ids).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def running_model(directory: Path, per_step: int = 3) -> Iterator[ToolModel]:
    """The model, which generates `per_step` tokens in a step."""
    checkpoint = tiny_tokenizer.checkpoint(directory, TAGS, max_model_len=200_000)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None

    def script(request: AddRequest) -> Script:
        prompt = tokenizer.decode(unpack_ids(request.prompt_ids).tolist(), skip_special_tokens=False)
        answered = "<tool_response>" in prompt
        output = ANSWER if answered or "<tools>" not in prompt else OUTPUT
        if "<tools>" not in prompt and "JSON" in prompt:
            output = ARGUMENTS[0]
        ids = tokenizer.encode(output, add_special_tokens=False)
        if request.max_tokens < len(ids):
            return Script(ids[: request.max_tokens], FinishReason.MAX_TOKENS, per_step=2)
        return Script([*ids, 1], FinishReason.EOS, 1, per_step=per_step)

    with FakeCore(directory, script, max_model_len=200_000) as core:
        yield ToolModel(checkpoint, tokenizer, core)


@contextlib.contextmanager
def running_server(model: ToolModel, server: ServerConfig | None = None, **fields: Any) -> Iterator[Client]:
    """The frontend of `model`."""
    with running_frontend(model.core, model.checkpoint, server, **fields) as client:
        yield client
