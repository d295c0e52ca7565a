"""A server with a small model of random weights, and clients that keep it busy."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.server import Server

MODEL_NAME = "random"
ARGS = (
    *("--load-dummy", "--dtype", "float32", "--device", "cpu", "--served-model-name", MODEL_NAME),
    *("--kv-cache-memory-bytes", str(1 << 27), "--cpu-threads", "1"),
)
_ENDLESS = 6000
_CLIENT_DEADLINE_S = 60.0


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """A Llama without weights, slow enough that a long response takes many seconds."""
    directory.mkdir(parents=True, exist_ok=True)
    found = tiny_tokenizer.checkpoint(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": found.vocab_size,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def write_tools_checkpoint(directory: Path, **changes: Any) -> Path:
    """As `write_checkpoint`, with a chat template that shows tools."""
    write_checkpoint(directory, **changes)
    tools = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    (directory / "chat_template.jinja").write_text(tools + tiny_tokenizer.TEMPLATE, encoding="utf-8")
    return directory


class Crowd:
    """Clients that stream responses that would take far longer than any test."""

    def __init__(self, size: int, max_tokens: int = _ENDLESS, **fields: Any):
        """`fields` are further ones of the requests."""
        self.ends: Counter[str] = Counter()
        """How the streams ended: finished, error event, cut off, refused, hung."""
        self.messages: set[str] = set()
        self.texts: dict[int, str] = {}
        """What each stream gave, by its number."""
        self._size = size
        self._max_tokens = max_tokens
        self._fields = fields
        self._streaming = 0
        self._flowing = asyncio.Event()

    @contextlib.asynccontextmanager
    async def streaming(self, server: Server) -> AsyncIterator[None]:
        """All of them have got text when the block begins; all have ended when it is left."""
        timeout = aiohttp.ClientTimeout(total=_CLIENT_DEADLINE_S)
        async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
            tasks = [asyncio.create_task(self._follow(session, i)) for i in range(self._size)]
            async with asyncio.timeout(_CLIENT_DEADLINE_S):
                await self._flowing.wait()
            try:
                yield
            finally:
                await asyncio.gather(*tasks)

    async def _follow(self, session: aiohttp.ClientSession, number: int) -> None:
        try:
            self.ends[await self._read_to_end(session, number)] += 1
        except TimeoutError:
            self.ends["hung"] += 1
        except aiohttp.ClientError:
            self.ends["cut off"] += 1

    async def _read_to_end(self, session: aiohttp.ClientSession, number: int) -> str:
        body = {
            "model": MODEL_NAME,
            "prompt": f"number {number}",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            **self._fields,
        }
        end, begun = "cut off", False
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return "refused"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return end if end == "error event" else "finished"
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.messages.add(event["error"]["message"])
                    end = "error event"
                    continue
                self.texts[number] = self.texts.get(number, "") + event["choices"][0]["text"]
                if not begun:
                    begun = True
                    self._count_one()
        return end

    def _count_one(self) -> None:
        self._streaming += 1
        if self._streaming == self._size:
            self._flowing.set()


async def seconds_until_unready(server: Server, limit_s: float) -> float:
    """How long `/ready` still gave 200 or no response; a refused connection counts as not ready."""
    begun = time.monotonic()
    async with aiohttp.ClientSession(server.url) as session:
        while time.monotonic() - begun < limit_s:
            try:
                async with session.get("/ready", timeout=aiohttp.ClientTimeout(total=1)) as response:
                    if response.status == 503:
                        break
            except TimeoutError:
                continue
            except aiohttp.ClientConnectionError:
                break
            await asyncio.sleep(0.05)
    return time.monotonic() - begun
