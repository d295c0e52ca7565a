"""Our engine under Dynamo's own frontend: `make test-dynamo`, with the names of some checks in ARGS.

Two workers with the same random weights. Prints what each check has found, and fails if one does not hold:
    options   every option of a request is honoured or refused
    cache     cached tokens of 300 requests, half with shared prefixes, by the KV router and round robin
    kills     an engine core, then a whole worker, under load: every request goes on, with the same ids
    drain     SIGTERM: running streams finish
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from atom import LLMEngine, SamplingParams
from tests.dynamo.processes import BLOCK_SIZE, Process, ending, free_port, frontend, wait_for_model, worker
from tests.helpers.servers.random_server import MODEL_NAME, write_checkpoint

NUM_REQUESTS = 300
PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 30, 240, 24
OUTPUT_TOKENS = 12
DRAINED_TOKENS = 300
CONCURRENCY = 4
TIMEOUT = aiohttp.ClientTimeout(total=120)
Prompts = list[list[int]]
NAMES = ["options", "cache", "kills", "drain"]


def prompts_of(seed: int) -> Prompts:
    """Half of them begin with one of a few long prefixes, the others are short; in random order."""
    chance = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [chance.randrange(2, 358) for _ in range(count)]

    prefixes = [ids(PREFIX_TOKENS) for _ in range(PREFIXES)]
    shared = [prefixes[number % PREFIXES] + ids(OWN_TOKENS) for number in range(NUM_REQUESTS // 2)]
    prompts = shared + [ids(2 * OWN_TOKENS) for _ in range(NUM_REQUESTS // 2)]
    chance.shuffle(prompts)
    return prompts


def reference(checkpoint: Path, prompts: dict[str, Prompts]) -> dict[str, list[list[int]]]:
    """The ids that one engine alone generates."""
    options = {"load_dummy": True, "dtype": "float32", "device": "cpu", "cpu_threads": 1}
    with LLMEngine(str(checkpoint), kv_cache_memory_bytes=1 << 28, **options) as engine:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        return {
            name: [output["token_ids"] for output in engine.generate(each, params)]
            for name, each in prompts.items()
        }


class Client:
    """Requests to one frontend."""

    def __init__(self, session: aiohttp.ClientSession, port: int):
        self._session, self._url = session, f"http://127.0.0.1:{port}"
        self.by_worker: Counter[int] = Counter()
        """Requests that each worker has ended."""

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body of a response."""
        async with self._session.post(self._url + path, json={"model": MODEL_NAME, **body}) as response:
            text = await response.text()
            with contextlib.suppress(ValueError):
                return response.status, json.loads(text)
            return response.status, text

    async def complete(self, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
        """Ids of a greedy completion, and how many tokens of its prompt were cached."""
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}, **fields}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, (status, answer)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length", answer
        usage = answer["usage"]
        assert usage["completion_tokens"] == body["max_tokens"], usage
        self.by_worker[answer["nvext"].get("worker_id", {}).get("decode_worker_id")] += 1
        return answer["nvext"]["completion_token_ids"], usage["prompt_tokens_details"]["cached_tokens"]

    async def stream(self, prompt: list[int], begun: asyncio.Event) -> int:
        """The number of tokens of a long stream; `begun` is set with the first of them."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": DRAINED_TOKENS, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        last: dict[str, Any] = {}
        async with self._session.post(self._url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    begun.set()
                    last = json.loads(line.removeprefix(b"data: "))
        tokens: int = last["usage"]["completion_tokens"]
        return tokens

    async def complete_all(
        self, prompts: Prompts, expected: list[list[int]], at_third: Any = None
    ) -> tuple[int, list[str]]:
        """(cached tokens, what went wrong); `at_third` is called once a third of the requests is done."""
        limit, cached, wrong, done = asyncio.Semaphore(CONCURRENCY), 0, [], 0

        async def one(prompt: list[int], ids: list[int]) -> None:
            nonlocal cached, done
            async with limit:
                try:
                    got, found = await self.complete(prompt)
                except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                    wrong.append(f"{type(error).__name__}: {error}"[:300])
                    return
                finally:
                    done += 1
                    if done == len(prompts) // 3 and at_third is not None:
                        at_third()
                cached += found
                if got != ids:
                    wrong.append(f"{got} instead of {ids}")

        await asyncio.gather(*map(one, prompts, expected))
        return cached, wrong


async def check_options(client: Client) -> None:
    """What the frontend passes on is honoured; what this engine cannot do is a 400 that names it."""
    prompt = prompts_of(99)[0]
    plain, _ = await client.complete(prompt)
    for field, value in (("n", 2), ("best_of", 2), ("min_tokens", 1 << 20), ("use_beam_search", True)):
        status, answer = await client.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 4, field: value}
        )
        print(f"  {field}={value}: {status} {json.dumps(answer)[:110]}")
        assert status == 400, (field, status, answer)
    again, cached = await client.complete(prompt)
    assert again == plain and cached >= len(prompt) - BLOCK_SIZE, (again, plain, cached)
    seeded = [await client.complete(prompt, temperature=1.0, seed=5) for _ in range(2)]
    other = await client.complete(prompt, temperature=1.0, seed=6)
    assert seeded[0][0] == seeded[1][0] != other[0]
    top = await client.complete(prompt, temperature=1.0, top_k=1)
    assert top[0] == plain
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    _, answer = await client.post("/v1/completions", body)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 4 == len(logprobs["top_logprobs"]), answer
    stop = plain[3]
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "stop_token_ids": [stop]}
    _, answer = await client.post("/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    assert answer["usage"]["completion_tokens"] == plain.index(stop) + 1, answer
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 60, "guided_choice": ["yes", "no"]}
    _, answer = await client.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] in ("yes", "no"), answer


def kill_core(process: Process) -> None:
    (core,) = (pid for pid, command in process.children().items() if "engine_core" in command)
    os.kill(core, signal.SIGKILL)


async def check_cached_tokens(clients: dict[str, Client], prompts: dict[str, Prompts], expected: Any) -> None:
    found = {}
    for mode, client in clients.items():
        start = time.monotonic()
        found[mode], wrong = await client.complete_all(prompts[mode], expected[mode])
        total = sum(map(len, prompts[mode]))
        print(
            f"  {mode}: {found[mode]} of {total} prompt tokens cached ({found[mode] / total:.1%}), "
            f"{NUM_REQUESTS} requests in {time.monotonic() - start:.1f} s, {len(wrong)} wrong; "
            f"by worker: {sorted(client.by_worker.values())}"
        )
        assert not wrong, wrong[:3]
    assert found["kv"] > found["round-robin"], found


async def served_by(worker: Process, client: Client) -> float:
    """Seconds until the worker has received another request, of prompts that no worker has cached."""
    begun, received = time.monotonic(), worker.text().count("request received")
    for prompt in prompts_of(7):
        await client.complete(prompt)
        if worker.text().count("request received") > received:
            return time.monotonic() - begun
        await asyncio.sleep(0.2)
    raise AssertionError(f"no request for {worker.name} in {time.monotonic() - begun:.0f} s")


async def check_kills(client: Client, workers: list[Process], prompts: Prompts, expected: Any) -> None:
    for what, kill in (
        ("the engine core of a worker", lambda: kill_core(workers[0])),
        ("a whole worker", workers[1].kill),
    ):
        _, wrong = await client.complete_all(prompts, expected, at_third=kill)
        print(f"  {what} killed: {NUM_REQUESTS - len(wrong)} of {NUM_REQUESTS} requests with the same ids")
        assert not wrong, wrong[:3]
        # The other worker is killed next, when the first one's engine is back and Dynamo sends to it again.
        await asyncio.to_thread(workers[0].wait_for, "engine, life 1, is ready")
        print(f"  Dynamo sends to {workers[0].name} again after {await served_by(workers[0], client):.1f} s")
    assert workers[0].process.poll() is None


async def check_drain(client: Client, process: Process, prompts: Prompts) -> None:
    """The streams that run at SIGTERM finish; then the worker ends with status 0."""
    begun = [asyncio.Event() for _ in range(4)]
    running = [asyncio.create_task(client.stream(*each)) for each in zip(prompts, begun, strict=False)]
    await asyncio.gather(*(event.wait() for event in begun))
    status = await asyncio.to_thread(process.terminate)
    lengths = await asyncio.gather(*running)
    print(f"  4 streams gave {lengths} of {DRAINED_TOKENS} tokens, exit status {status}")
    assert lengths == [DRAINED_TOKENS] * 4 and status == 0


async def run(directory: Path, names: list[str]) -> None:
    checkpoint = write_checkpoint(directory / "model")
    modes = ("kv", "round-robin")
    prompts = {mode: prompts_of(seed) for seed, mode in enumerate((*modes, "kills"))}
    expected = reference(checkpoint, prompts) if {"cache", "kills"}.intersection(names) else {}
    workers = [worker(number, checkpoint, directory) for number in range(2)]
    ports = {mode: free_port() for mode in modes}
    frontends = {mode: frontend(mode, directory, port) for mode, port in ports.items()}
    with ending(*workers, *frontends.values()):
        for each in workers:
            each.wait_for("Serving")
        for mode, each in frontends.items():
            await asyncio.to_thread(wait_for_model, each, ports[mode])
        await asyncio.sleep(3)  # the routers connect to the workers' events
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            clients = {mode: Client(session, port) for mode, port in ports.items()}
            for name in names:
                print(name)
                match name:
                    case "options":
                        await check_options(clients["kv"])
                    case "cache":
                        await check_cached_tokens(clients, prompts, expected)
                    case "kills":
                        await check_kills(clients["kv"], workers, prompts["kills"], expected["kills"])
                    case "drain":
                        await check_drain(clients["kv"], workers[0], prompts["kv"])
    print("all checks hold")


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="dynamo-") as directory:
        try:
            asyncio.run(run(Path(directory), sys.argv[1:] or NAMES))
        except BaseException:
            for log in sorted(Path(directory).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
