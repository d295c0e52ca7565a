"""Images through a whole server: three APIs, ids of transformers, refusals that cost one request."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tokenizers
import torch

from tests.helpers.server import running_server
from tests.helpers.vision_models import (
    TAGS,
    Processed,
    data_url,
    hf_follows,
    picture,
    processed,
    save_with_tokenizer,
)

pytestmark = pytest.mark.timeout(600)
COUNT = 12
WIDE, TALL = picture(90, 33), picture(20, 70, kind="JPEG")


class Served:
    def __init__(self, url: str, model: torch.nn.Module, directory: Path):
        self._address = urlsplit(url).netloc
        self._model = model
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, decoded body)."""
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=180)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": "m", **body}), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def chat(self, *content: Any, **more: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": [*content]}]
        fields = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/chat/completions", messages=messages, **fields | more)

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("vision")
    model = save_with_tokenizer("qwen3_vl", directory)
    arguments = (
        "--model",
        str(directory),
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    more = ("--kv-cache-memory-bytes", str(1 << 24), "--cpu-threads", "1", "--max-num-batched-tokens", "32")
    with running_server(*arguments, *more) as server:
        yield Served(server.url, model, directory)


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
