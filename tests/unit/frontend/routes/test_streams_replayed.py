"""Streams whose engine ends while they wait for their client."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.messages.engine import AddRequest, FinishReason
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import MODEL, Client, running_frontend
from tests.helpers.servers.resuming import without_times

BODY = {"model": MODEL, "stream": True, "prompt": "a", "n": 2, "max_tokens": 60}
HEADERS = {"X-Resumable-Stream": "true"}


class Engines:
    """Two engines; each sequence gets its own text, the second one a shorter one."""

    def __init__(self, directory: Path):
        self.checkpoint = tiny_tokenizer.checkpoint(directory)
        self.last_step = sys.maxsize
        """They wait after it."""
        encode = tiny_tokenizer.tokenizer().encode
        texts = ["Hello world, 你好. " * 4, "Hi"]
        ids = [encode(text, add_special_tokens=False) for text in texts]

        def script(request: AddRequest) -> Script:
            return Script([*ids[request.sampling.sequence], 1], FinishReason.EOS, 1)

        self.cores = [FakeCore(directory, script, rank=rank, waits=self._wait) for rank in range(2)]

    @property
    def steps(self) -> int:
        return sum(core.steps for core in self.cores)

    def _wait(self) -> bool:
        return self.steps >= self.last_step


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    with engines.cores[0], engines.cores[1]:
        yield engines


def data_of(lines: bytes) -> list[str]:
    found = lines.decode().splitlines()
    return [without_times(line[6:]) for line in found if line.startswith("data: ")]


def read_until(client: Client, engines: Engines, count: int) -> tuple[list[str], str]:
    """(the data of the first events, the id of the last one); then the client is gone, the engines wait."""
    engines.last_step = engines.steps + 30
    connection = client.connection()
    connection.request("POST", "/v1/completions", json.dumps(BODY), HEADERS)
    response = connection.getresponse()
    lines: list[bytes] = []
    while lines.count(b"\n") < count:
        lines.append(response.readline())
    response.close()
    connection.close()
    last = next(line for line in reversed(lines) if line.startswith(b"id: "))
    return data_of(b"".join(lines)), last[4:].decode().strip()


def test_the_sequences_go_on_at_another_engine(engines: Engines) -> None:
    """One of them has ended before: the other engine knows nothing of it."""
    with running_frontend(engines.cores, engines.checkpoint) as client:
        _, whole, _ = client.exchange("POST", "/v1/completions", BODY, headers=HEADERS)
        for core in engines.cores:
            core.requests.clear()
        got, last = read_until(client, engines, 9)
        (first,) = (core for core in engines.cores if core.requests)
        (other,) = (core for core in engines.cores if core is not first)
        first.die("a test ends it")
        other.wait_for(lambda: other.requests)
        engines.last_step = sys.maxsize
        path = f"/v1/streams/{last.partition('/')[0]}"
        status, rest, _ = client.exchange("GET", path, headers={"Last-Event-ID": last})
        assert status == 200, rest
        assert sorted(got + data_of(rest)) == sorted(data_of(whole))
        assert [len(request.request_ids) for request in other.requests] == [1]
