"""A server with a small model of random weights, and clients that keep it busy."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
ENDLESS = 60_000
"""Tokens that no test waits for: a request may have 65,536."""
_CLIENT_DEADLINE_S = 120.0


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
        "max_position_embeddings": 1 << 16,
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
    """Clients that stream responses, which take far longer than any test unless `max_tokens` is given.

    However fast the machine is, such a response has not ended when a process is killed, and however slow it
    is, no test waits for its last token: `go_on` and `abort_all` end one.
    """

    def __init__(self, size: int, max_tokens: int = ENDLESS, **fields: Any):
        """`fields` are further ones of the requests."""
        self.ends: Counter[str] = Counter()
        """How the streams ended: finished, error event, cut off, refused, hung."""
        self.messages: set[str] = set()
        self.texts: dict[int, str] = {}
        """What each stream gave, by its number."""
        self._size = size
        self._max_tokens = max_tokens
        self._fields = fields
        self._events: Counter[int] = Counter()
        self._open: set[int] = set()
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
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise
            finally:
                await asyncio.gather(*tasks, return_exceptions=True)

    async def go_on(self, events: int = 20) -> None:
        """Returns once each stream that is open has got so many events more, or has ended."""
        wanted = {number: self._events[number] + events for number in self._open}
        await self.until(lambda: all(self._events[number] >= wanted[number] for number in self._open))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition` holds."""
        async with asyncio.timeout(_CLIENT_DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def _follow(self, session: aiohttp.ClientSession, number: int) -> None:
        try:
            self.ends[await self._read_to_end(session, number)] += 1
        except TimeoutError:
            self.ends["hung"] += 1
        except aiohttp.ClientError:
            self.ends["cut off"] += 1
        finally:
            self._open.discard(number)

    async def _read_to_end(self, session: aiohttp.ClientSession, number: int) -> str:
        body = {
            "model": MODEL_NAME,
            "prompt": f"number {number}",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            **self._fields,
        }
        end = "cut off"
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
                self._events[number] += 1
                self._open.add(number)
                if len(self._events) == self._size:
                    self._flowing.set()
        return end


async def abort_all(admin: Path) -> None:
    """End all requests of the server with this administration socket; streams end as finished ones do.

    A frontend that has just started knows no engine yet, and is asked again.
    """
    connector = aiohttp.UnixConnector(str(admin))
    async with (
        aiohttp.ClientSession("http://localhost", connector=connector) as session,
        asyncio.timeout(_CLIENT_DEADLINE_S),
    ):
        while True:
            async with session.post("/abort_requests", json={"abort_all": True}) as response:
                if response.status == 200:
                    return
                assert response.status == 503, await response.text()
            await asyncio.sleep(0.1)


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
