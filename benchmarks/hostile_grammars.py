"""Measures what the worst grammars cost the streams of other requests, on a running server.

    python -m benchmarks.hostile_grammars --url http://127.0.0.1:8000 --grammars 200

Two streams run all the time, one of free text and one of JSON. Known attacks and random grammars, regular
expressions and schemas are sent one after another, each with several choices; those that the server admits
run for some seconds. Printed are the longest gaps between two chunks of the streams, and the grammars that
they came with.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import msgspec

from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, not_negative, positive
from benchmarks.common.report import report, write

_MAX_TOKENS = 100_000
_ALONE_S = 5.0
_RUN_S = 3.0
_SHOWN = 3  # each of admitted and of refused ones
ATTACKS: list[dict[str, Any]] = [
    {"grammar": 'root ::= "#" | root root'},
    {"grammar": 'root ::= a\na ::= a a | b\nb ::= [#a-z]+ | [#a-z]* c\nc ::= [#a-z]+ | ""'},
    {"grammar": 'root ::= "a" root "a" | "a" root | "a"'},
    {"grammar": 'root ::= x x x x x x x x\nx ::= [a-z ]* | [a-z ]* "," [a-z ]*'},
    {"grammar": "root ::= " + " | ".join(f'"{number * 7919:x}"' for number in range(3300))},
    {"grammar": 'root ::= ("a"{200} root root) | "a"'},
    {"regex": "(([a-z]{0,50}){0,50}){0,50}"},
    {"regex": "(a?){300}(a*)*b"},
    {"regex": "([a-z ]+)+([a-z ]+)+([a-z ]+)+!"},
    {"json": {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": "^(a|b)*$"}] * 40}}},
    {"json": {"anyOf": [{"type": "array", "items": {"anyOf": [{"type": "string"}, {}]}}] * 20}},
]


@dataclass
class Stream:
    """When the chunks of a stream that runs all the time arrived."""

    name: str
    at: list[float] = field(default_factory=list)

    def longest_gap(self, start: float, end: float) -> float:
        """Milliseconds between two chunks, or between the last one and `end`."""
        inside = [start, *(moment for moment in self.at if start <= moment <= end), end]
        return 1000 * max(later - earlier for earlier, later in itertools.pairwise(inside))


@dataclass(frozen=True)
class Row:
    """What one grammar cost."""

    constraint: dict[str, Any]
    longest_gap_ms: dict[str, float]
    status: int


class Client:
    """Requests to the server."""

    def __init__(self, session: aiohttp.ClientSession, model: str, choices: int):
        self._session = session
        self._model = model
        self._choices = choices

    async def stream(self, stream: Stream, **fields: Any) -> None:
        """Read one request after another, as streams."""
        while True:
            async for moment in self._chunks(fields):
                stream.at.append(moment)

    async def send(self, constraint: dict[str, Any], seed: int) -> int:
        """Let a grammar run for a time, if it is admitted; the HTTP status."""
        body = {
            **self._body({"structured_outputs": constraint}),
            "n": self._choices,
            "seed": seed,
            "temperature": 2.0,
            "min_tokens": 500,
        }
        async with self._session.post("/v1/completions", json=body) as answer:
            if answer.status == 200:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answer.read(), _RUN_S)
            return answer.status

    async def _chunks(self, fields: dict[str, Any]) -> AsyncIterator[float]:
        body = {**self._body(fields), "ignore_eos": "structured_outputs" not in fields}
        async with self._session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"error: the server answered {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield time.monotonic()

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": "one two three",
            "max_tokens": 1000,
            "stream": True,
            "temperature": 1.0,
            **fields,
        }


def main() -> None:
    args = _parser().parse_args()
    result = report("hostile_grammars", [], asyncio.run(measure(args)))
    print(text(result))
    write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(prog="benchmarks.hostile_grammars", description=__doc__)
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8000", help="where the server answers")
    add("--grammars", type=not_negative, default=100, help="random grammars, after the known attacks")
    add("--choices", type=positive, default=8, help="choices of each request with a grammar")
    add("--seed", type=not_negative, default=0, help="seed of the grammars")
    add_output_flag(group)
    return parser


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The longest gaps of the streams, alone and with each grammar."""
    chance = random.Random(args.seed)
    constraints = ATTACKS + [random_constraint(chance) for _ in range(args.grammars)]
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(args.url, timeout=timeout) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        client = Client(session, model, args.choices)
        streams = [Stream("free"), Stream("json")]
        tasks = [
            asyncio.create_task(client.stream(streams[0])),
            asyncio.create_task(client.stream(streams[1], structured_outputs={"json": {"type": "array"}})),
        ]
        try:
            await _begun(streams, tasks)
            alone, _ = await _measured(streams, asyncio.sleep(_ALONE_S, 0))
            rows = [
                Row(constraint, *await _measured(streams, client.send(constraint, number)))
                for number, constraint in enumerate(constraints)
            ]
        finally:
            for task in tasks:
                task.cancel()
    rows.sort(key=lambda row: -row.longest_gap_ms["free"])
    admitted = [row for row in rows if row.status == 200]
    refused = [row for row in rows if row.status != 200]
    return {
        "alone_ms": alone,
        "sent": len(rows),
        "admitted": len(admitted),
        "worst": [asdict(row) for row in admitted[:_SHOWN] + refused[:_SHOWN]],
    }


async def _begun(streams: list[Stream], tasks: list[asyncio.Task[None]]) -> None:
    while any(len(stream.at) < 20 for stream in streams):
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()


async def _measured(streams: list[Stream], run: Coroutine[Any, Any, int]) -> tuple[dict[str, float], int]:
    """The longest gaps while something runs, and what it returns."""
    start = time.monotonic()
    returned = await run
    end = time.monotonic()
    return {stream.name: stream.longest_gap(start, end) for stream in streams}, returned


def random_constraint(chance: random.Random) -> dict[str, Any]:
    """A grammar, a regular expression or a schema that derives texts in many ways."""
    kind: Callable[[random.Random], dict[str, Any]] = chance.choice([_grammar, _regex, _schema])
    return kind(chance)


def _grammar(chance: random.Random) -> dict[str, Any]:
    names = ["root", "a", "b", "c", "d"][: chance.randint(1, 5)]

    def item() -> str:
        atom = chance.choice([*names, '"#"', '"a"', "[a-z]", "[#a-z ]", '""', '[^"]', '"aaaa"'])
        return atom + chance.choice(["", "", "", "*", "+", "?", "{0,20}"])

    rules = []
    for name in names:
        alternatives = [
            " ".join(item() for _ in range(chance.randint(1, 4))) for _ in range(chance.randint(1, 4))
        ]
        rules.append(f"{name} ::= {' | '.join([*alternatives, '[a-z]'])}")
    return {"grammar": "\n".join(rules)}


def _regex(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    def part(left: int) -> str:
        atom = chance.choice(["a", "[a-z]", "[a-z ]", ".", "#"])
        if left and chance.random() < 0.7:
            atom = f"({'|'.join(part(left - 1) for _ in range(chance.randint(1, 3)))})"
        return atom + chance.choice(["", "*", "+", "?", "{0,30}", "{3,9}"])

    return {"regex": "".join(part(depth) for _ in range(chance.randint(1, 4)))}


def _schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    def part(left: int) -> dict[str, Any]:
        if left and chance.random() < 0.7:
            if chance.random() < 0.5:
                return {"anyOf": [part(left - 1) for _ in range(chance.randint(2, 6))]}
            return {"type": "array", "items": part(left - 1), "maxItems": chance.randint(1, 200)}
        if chance.random() < 0.5:
            return {"type": "string", "pattern": _regex(chance, 2)["regex"].replace(".", "[a-z]")}
        return {"type": chance.choice(["string", "object", "array", "number"])}

    return {"json": part(depth)}


def text(result: dict[str, Any]) -> str:
    """The figures in some lines."""
    alone = result["alone_ms"]
    lines = [
        f"{result['sent']} grammars, {result['admitted']} admitted; longest gaps of the free and the JSON "
        f"stream: alone {alone['free']:.0f} and {alone['json']:.0f} ms"
    ]
    for row in result["worst"]:
        gaps = row["longest_gap_ms"]
        source = msgspec.json.encode(row["constraint"]).decode()
        lines.append(f"{gaps['free']:5.0f} {gaps['json']:5.0f} ms  {row['status']}  {source[:100]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
