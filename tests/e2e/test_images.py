"""Images through a whole server: three APIs, ids of transformers, refusals that cost one request."""

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tokenizers
import torch

from tests.helpers.checkpoints.vision_models import (
    TAGS,
    Processed,
    data_url,
    hf_follows,
    picture,
    processed,
    save_with_tokenizer,
)
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(600)
COUNT = 12
WIDE, TALL = picture(90, 33), picture(20, 70, kind="JPEG")


class Served:
    def __init__(self, server: Server, model: torch.nn.Module, directory: Path):
        self.server = server
        self._address = urlsplit(server.url).netloc
        self._model = model
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, decoded body)."""
        with self._response(path, body) as response:
            return response.status, json.loads(response.read())

    def chat(self, *content: Any, **more: Any) -> tuple[int, Any]:
        return self.post("/v1/chat/completions", **_chat(content, **more))

    def stream(self, *content: Any) -> Iterator[Any]:
        """The chunks of a chat completion."""
        with self._response("/v1/chat/completions", _chat(content, stream=True)) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def resumed(self, after: int, *content: Any) -> list[Any]:
        """The chunks of a stream whose client leaves after so many of them, and asks for the rest."""
        path, body = "/v1/chat/completions", _chat(content, stream=True)
        found = []
        with self._response(path, body, {"X-Resumable-Stream": "true"}) as response:
            key = response.headers["X-Stream-Id"]
            while len(found) < after:
                if (line := response.readline()).startswith(b"data: "):
                    found.append(json.loads(line[6:]))
        with self._response(path, body, {"Last-Event-ID": f"{key}/{after}"}) as response:
            lines = response.read().splitlines()
        return found + [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @contextlib.contextmanager
    def _response(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=180)) as connection:
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps({"model": "m", **body}), headers)
            yield connection.getresponse()

    def ids(self, *parts: str | Processed) -> list[int]:
        """The prompt of a user message."""
        image, start, end = map(self._tokenizer.token_to_id, TAGS)
        ids: list[int] = []
        for part in ("[user]", *parts, "[assistant]"):
            if isinstance(part, str):
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
            else:
                ids += [start, *[image] * part.num_tokens, end]
        return ids

    def follows(self, output: list[int], *parts: str | Processed) -> list[int]:
        """`output` if transformers continues the prompt so."""
        assert len(output) == COUNT
        images = [part for part in parts if isinstance(part, Processed)]
        return hf_follows(self._model, self.ids(*parts), images, output)


def _chat(content: Sequence[Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*content]}]
    fields = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"messages": messages, **fields, **more}


@contextlib.contextmanager
def serving(model_type: str, directory: Path, max_num_seqs: int, budget: int) -> Iterator[Served]:
    """A server of a tiny model whose steps have at most `budget` tokens."""
    model = save_with_tokenizer(model_type, directory)
    arguments = ["--model", str(directory), "--served-model-name", "m", "--dtype", "float32"]
    arguments += ["--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory-bytes", str(1 << 24)]
    arguments += ["--max-num-batched-tokens", str(budget), "--max-num-seqs", str(max_num_seqs)]
    arguments += ["--allowed-media-domains", "images.example.org,localhost:9"]
    with running_server(*arguments) as server:
        yield Served(server, model, directory)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("qwen3_vl", tmp_path_factory.mktemp("vision"), 256, 32) as server:
        yield server


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(file: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file, kind)}}


def test_chat(served: Served) -> None:
    """In chunks of 32 tokens, which cut the images; then from the prefix cache."""
    parts = "Look: ", processed(WIDE), "and ", processed(TALL), "What is it?"
    length = len(served.ids(*parts))
    for cached in (0, length // 16 * 16):
        status, found = served.chat(
            text("Look: "), image(WIDE), text("and "), image(TALL, "jpeg"), text("What is it?")
        )
        assert status == 200, found
        output = found["choices"][0]["token_ids"]
        assert output == served.follows(output, *parts)
        assert found["usage"]["prompt_tokens"] == length
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_two_choices_of_one_image(served: Served) -> None:
    status, found = served.chat(image(TALL, "jpeg"), n=2)
    assert status == 200, found
    for choice in found["choices"]:
        assert choice["token_ids"] == served.follows(choice["token_ids"], processed(TALL))


def test_a_client_that_comes_again(served: Served) -> None:
    parts = "Look: ", processed(WIDE)
    chunks = served.resumed(4, text("Look: "), image(WIDE))
    output = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert output == served.follows(output, *parts)
    assert chunks[0]["prompt_token_ids"] == served.ids(*parts)


def test_responses_and_messages(served: Served) -> None:
    """The same prompt in each form, as its length and its text tell."""
    _, chat = served.chat(text("Look: "), image(WIDE), text("well?"), max_tokens=6)
    wanted = chat["choices"][0]["message"]["content"]
    content = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": data_url(WIDE), "detail": "auto"},
        {"type": "input_text", "text": "well?"},
    ]
    items = [{"type": "message", "role": "user", "content": content}]
    fields = {"max_output_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, found = served.post("/v1/responses", input=items, **fields)
    assert status == 200, found
    assert found["output"][0]["content"][0]["text"] == wanted
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": data_url(WIDE).partition(",")[2]}
    blocks = [text("Look: "), {"type": "image", "source": source}, text("well?")]
    messages = [{"role": "user", "content": blocks}]
    status, counted = served.post("/v1/messages/count_tokens", messages=messages)
    assert (status, counted["input_tokens"]) == (200, chat["usage"]["prompt_tokens"])
    status, found = served.post("/v1/messages", messages=messages, max_tokens=6, temperature=0)
    assert status == 200, found
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_the_ids_of_a_conversation(served: Served) -> None:
    messages = [{"role": "user", "content": [image(WIDE)]}]
    status, found = served.post("/tokenize", messages=messages)
    assert (status, found["tokens"]) == (200, served.ids(processed(WIDE)))


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "does not list"),
        ({"type": "image_url", "image_url": {"url": "http://localhost:9/a.png"}}, "which is not public"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, "not an image"),
        ({"type": "image_url", "image_url": {"url": data_url(WIDE[: len(WIDE) // 2])}}, "truncated"),
        ({"type": "image_url", "image_url": {"url": data_url(WIDE), "detail": "low"}}, "detail"),
        (image(picture(1500, 4)), "aspect ratio"),
    ],
)
def test_an_image_that_cannot_be_used(part: dict[str, Any], error: str, served: Served) -> None:
    status, found = served.chat(text("Look: "), part)
    assert status == 400 and error in found["error"]["message"], found
    assert found["error"]["param"].startswith("messages[0].content[1]")


def test_images_that_the_template_does_not_write_whole(tmp_path: Path) -> None:
    """Gemma 3: lines around each image; its tokens see each other, so chunks of 24 tokens end before them."""
    with serving("gemma3", tmp_path, 8, 24) as gemma3:
        wide, tall = (processed(file, "gemma3") for file in (WIDE, TALL))
        parts = "Look: \n\n", wide, "\n\nand \n\n", tall, "\n\nWhat is it?"
        content = text("Look: "), image(WIDE), text("and "), image(TALL, "jpeg"), text("What is it?")
        for cached in (0, len(gemma3.ids(*parts)) // 16 * 16):
            status, found = gemma3.chat(*content)
            assert status == 200, found
            output = found["choices"][0]["token_ids"]
            assert output == gemma3.follows(output, *parts)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        written = text(f"{TAGS[1]} is text"), image(WIDE)
        status, found = gemma3.chat(*written)
        assert status == 200, found
        status, found = gemma3.chat(text("Hello"))
        assert status == 200, found


@pytest.mark.slow
def test_images_padded_to_whole_tokens(tmp_path: Path) -> None:
    """Kimi-K2.5, in chunks of 24 tokens that cut images."""
    with serving("kimi_k25", tmp_path, 8, 24) as kimi:
        parts = "Look: ", processed(WIDE, "kimi_k25"), "What is it?"
        status, found = kimi.chat(text("Look: "), image(WIDE), text("What is it?"))
        assert status == 200, found
        output = found["choices"][0]["token_ids"]
        assert output == kimi.follows(output, *parts)


@pytest.mark.slow
def test_a_killed_engine(served: Served) -> None:
    """A stream goes on with its image on the next life of the engine."""
    parts = "Look: ", processed(TALL)
    (core,) = (pid for pid, line in served.server.children().items() if "engine_core.process" in line)
    output: list[int] = []
    for chunk in served.stream(text("Look: "), image(TALL, "jpeg")):
        output += chunk["choices"][0].get("token_ids") or []
        if core and output:
            os.kill(core, signal.SIGKILL)
            core = 0
    assert output == served.follows(output, *parts)
