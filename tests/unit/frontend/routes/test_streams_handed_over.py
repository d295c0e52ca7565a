"""Streams of a server that was replaced: the supervisor has them, and they go on at engines here."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest, FinishReason, pack_ids
from atom.shared.messages.resume import (
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    GetStream,
    HandedStream,
)
from atom.shared.messages.supervisor import ToControl, control_identity
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import MODEL, Client, running_frontend
from tests.helpers.servers.resuming import without_times

IDS = [*tiny_tokenizer.tokenizer().encode("Hello world, one two three four", add_special_tokens=False), 1]
BODY = {"model": MODEL, "stream": True, "prompt": "a", "max_tokens": 60}
HEADERS = {"X-Resumable-Stream": "true"}


def script(request: AddRequest) -> Script:
    return Script(IDS, FinishReason.EOS, 1)


def data_of(lines: bytes) -> list[str]:
    found = lines.decode().splitlines()
    return [without_times(line[6:]) for line in found if line.startswith("data: ")]


class Supervisor:
    """Answers GetStream by `answers`, one after the other; the last one again and again."""

    def __init__(self, directory: Path, answers: Callable[[GetStream], list[HandedStream]]):
        self.endpoint = f"ipc://{directory}/control"
        self.questions: list[GetStream] = []
        self._answers = answers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self.endpoint)
        decoder = Decoder[ToControl](ToControl)
        while not self._stop.is_set():
            if not socket.poll(50):
                continue
            question = decoder.decode(socket.recv_multipart()[1])
            if isinstance(question, GetStream):
                answers = self._answers(question)
                answer = answers[min(len(self.questions), len(answers) - 1)]
                self.questions.append(question)
                socket.send_multipart([control_identity(0), encode(answer)])
        context.destroy(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Begun:
    """A stream of another server, of which a client has got some events."""

    def __init__(self, directory: Path):
        self.checkpoint = tiny_tokenizer.checkpoint(directory)
        with (
            FakeCore(directory, script) as core,
            running_frontend(core, self.checkpoint) as client,
        ):
            status, whole, _ = client.exchange("POST", "/v1/completions", BODY, headers=HEADERS)
            assert status == 200
            request = core.requests[-1]
        self.events = data_of(whole)
        ids = [line[4:] for line in whole.decode().splitlines() if line.startswith("id: ")]
        self.last = ids[2]
        self.key = self.last.partition("/")[0]
        sequence = ClaimedSequence(request.request_ids[0], pack_ids(IDS[:5]))
        self.claimed = Claimed(0, self.key, [ClaimedRequest(encode(request), [sequence])], left_s=30.0)


@pytest.fixture
def begun(tmp_path: Path) -> Begun:
    (tmp_path / "old").mkdir()
    return Begun(tmp_path / "old")


@contextlib.contextmanager
def replaced(
    directory: Path, begun: Begun, answers: Callable[[GetStream], list[HandedStream]]
) -> Iterator[tuple[Client, FakeCore, Supervisor]]:
    with (
        contextlib.closing(Supervisor(directory, answers)) as supervisor,
        FakeCore(directory, script) as core,
        running_frontend(
            core, begun.checkpoint, control=supervisor.endpoint, first_life=1, num_frontends=2
        ) as client,
    ):
        yield client, core, supervisor


def ask(client: Client, begun: Begun) -> tuple[int, bytes]:
    status, body, _ = client.exchange(
        "GET", f"/v1/streams/{begun.key}", headers={"Last-Event-ID": begun.last}
    )
    return status, body


def test_the_rest_is_computed_here_from_the_ids_that_the_other_server_had(
    begun: Begun, tmp_path: Path
) -> None:
    """While that server still runs the client waits."""

    def answers(question: GetStream) -> list[HandedStream]:
        number = question.number
        return [
            HandedStream(number, is_pending=True),
            HandedStream(number, [begun.claimed]),
            HandedStream(number),
        ]

    with replaced(tmp_path, begun, answers) as (client, core, supervisor):
        status, rest = ask(client, begun)
        assert status == 200, rest
        assert begun.events[:3] + data_of(rest) == begun.events
        (request,) = core.requests
        assert request.prompt_ids.endswith(pack_ids(IDS[:5])) and request.prompt_length > 0
        assert len(supervisor.questions) == 2 and supervisor.questions[0].key == begun.key
        # The stream is known here now, and the supervisor has it no more.
        assert ask(client, begun)[0] == 200


def test_another_model_refuses_it_by_name(begun: Begun, tmp_path: Path) -> None:
    def answers(question: GetStream) -> list[HandedStream]:
        return [HandedStream(question.number, refusal="config.json's num_layers: 2, not 3")]

    with replaced(tmp_path, begun, answers) as (client, core, _):
        status, body = ask(client, begun)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "stream_of_other_model")
        assert "num_layers: 2, not 3" in error["message"] and begun.key in error["message"]
        assert not core.requests


def test_an_unknown_stream_is_unknown(begun: Begun, tmp_path: Path) -> None:
    with replaced(tmp_path, begun, lambda question: [HandedStream(question.number)]) as (client, _, _):
        status, body = ask(client, begun)
        assert (status, json.loads(body)["error"]["code"]) == (404, "stream_not_found")
