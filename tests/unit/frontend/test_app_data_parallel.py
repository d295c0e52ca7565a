"""Several engines and several frontends over HTTP: readiness, the choice of a rank, metrics, control."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest, FinishReason
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.supervisor import EngineEnded, Engines, GetEngines, control_identity
from frontend.metrics.exposition import Snapshot, expose
from frontend.metrics.shared_metrics import SharedMetrics
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, MODEL, Client, running_frontend

OUTPUT = tiny_tokenizer.tokenizer().encode("one two three", add_special_tokens=False)
HEADER = "X-Data-Parallel-Rank"


def script(_: AddRequest) -> Script:
    return Script(OUTPUT, FinishReason.MAX_TOKENS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path)


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[list[FakeCore]]:
    with FakeCore(tmp_path, script) as first, FakeCore(tmp_path, script, rank=1) as second:
        yield [first, second]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def samples(client: Client) -> dict[tuple[str, ...], float]:
    """Values by name and by the values of the labels, without the model."""
    status, body, _ = client.exchange("GET", "/metrics")
    assert status == 200
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_a_scrape_formats_its_text_outside_of_the_event_loop(
    cores: list[FakeCore], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes about 3 ms of each engine: with 16 of them all streams would wait 50 ms at each scrape."""
    in_loop: list[bool] = []

    def formatted(snapshot: Snapshot) -> bytes:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            in_loop.append(True)
        return expose(snapshot)

    monkeypatch.setattr("frontend.routes.info.expose", formatted)
    with running_frontend(cores, checkpoint) as client:
        assert samples(client)["atom:engine_up", "1"] in (0.0, 1.0)
    assert not in_loop


def is_up(client: Client, rank: int) -> bool:
    return samples(client)["atom:engine_up", str(rank)] == 1


def complete(client: Client, headers: dict[str, str] | None = None, **fields: Any) -> int:
    """The status of a completion."""
    body = {"prompt": "go"} | fields
    return client.exchange("POST", "/v1/completions", body, headers=headers)[0]


def test_the_server_is_ready_while_one_rank_lives(cores: list[FakeCore], checkpoint: Checkpoint) -> None:
    with running_frontend(cores, checkpoint) as client:
        until(lambda: is_up(client, 0) and is_up(client, 1))
        cores[0].die("worker 0: killed")
        until(lambda: not is_up(client, 0))
        assert client.exchange("GET", "/ready")[0] == client.exchange("GET", "/health")[0] == 200
        assert [complete(client) for _ in range(4)] == [200] * 4
        cores[1].die("worker 0: killed")
        until(lambda: client.exchange("GET", "/ready")[0] == 503)
        assert client.exchange("GET", "/health")[0] == 200
        assert complete(client) == 503


def ready(client: Client) -> tuple[int, str]:
    """The status of /ready, and the reason."""
    status, body = client.call("GET", "/ready")
    return status, body.get("reason", "")


def test_the_server_is_not_ready_before_all_its_engines_are(
    cores: list[FakeCore], checkpoint: Checkpoint
) -> None:
    """Requests are served meanwhile."""
    cores[1].freeze()
    with running_frontend(cores, checkpoint, wait=False) as client:
        until(lambda: is_up(client, 0))
        assert ready(client) == (503, "engine 1 is still starting; try again shortly")
        assert complete(client) == 200
        cores[1].frozen.clear()
        until(lambda: is_up(client, 1))
        assert ready(client) == (200, "")


def test_a_request_may_name_its_rank(cores: list[FakeCore], checkpoint: Checkpoint) -> None:
    def counts() -> list[int]:
        return [len(core.requests) for core in cores]

    with running_frontend(cores, checkpoint) as client:
        until(lambda: is_up(client, 0) and is_up(client, 1))
        assert [complete(client, {HEADER: "1"}) for _ in range(3)] == [200] * 3
        assert counts() == [0, 3]
        assert complete(client, {HEADER: "1"}, data_parallel_rank=0) == 200
        assert counts() == [1, 3]
        assert complete(client, data_parallel_rank=1, n=2) == 200
        assert counts() == [1, 5]
        for headers, fields in (({HEADER: "2"}, {}), ({HEADER: "-1"}, {}), ({HEADER: "²"}, {}), ({}, 2)):
            given = {"data_parallel_rank": fields} if fields else {}
            assert complete(client, headers, **given) == 400
        cores[1].die("worker 0: killed")
        until(lambda: not is_up(client, 1))
        assert complete(client, data_parallel_rank=1, timeout=0.2) == 408  # it has waited for the engine
        assert counts() == [1, 5]


def test_core_figures_have_the_rank_as_their_label(cores: list[FakeCore], checkpoint: Checkpoint) -> None:
    with running_frontend(cores, checkpoint) as client:
        until(lambda: is_up(client, 0) and is_up(client, 1))
        for rank in (0, 1, 1):
            complete(client, data_parallel_rank=rank)
        found = samples(client)
        for name in ("vllm:num_requests_running", "atom:kv_blocks", "vllm:kv_cache_usage_perc"):
            assert {key[1] for key in found if key[0] == name} == {"0", "1"}
        tokens = [found["vllm:generation_tokens_total", rank] for rank in "01"]
        assert tokens == [len(OUTPUT), 2 * len(OUTPUT)]
        assert found["vllm:request_success_total", "1", "length"] == 2
        engines = client.call("GET", "/server_info")[1]["engines"]
        assert engines == [{"rank": rank, "life": 0, "state": "ready"} for rank in (0, 1)]


@contextlib.contextmanager
def frontend(
    cores: list[FakeCore], checkpoint: Checkpoint, directory: Path, index: int, **fields: Any
) -> Iterator[Client]:
    shared = {"run_dir": str(directory), "index": index, "num_frontends": 2}
    with running_frontend(cores, checkpoint, **shared, **fields) as client:
        yield client


def test_a_scrape_of_any_frontend_shows_the_sum(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def generated(client: Client) -> float:
        found = samples(client)
        return sum(value for key, value in found.items() if key[0] == "vllm:generation_tokens_total")

    with frontend(cores, checkpoint, tmp_path, 0) as first:
        with frontend(cores, checkpoint, tmp_path, 1) as second:
            assert [complete(first) for _ in range(3)] + [complete(second) for _ in range(2)] == [200] * 5
            until(lambda: generated(first) == generated(second) == 5 * len(OUTPUT))
            found = samples(second)
            assert found["atom:http_responses_total", "200"] >= 5
            assert ("process_resident_memory_bytes", "1") in found
            last = 0.0
            for client in [first, second] * 10:  # no counter falls from one scrape to the next
                complete(client)
                shown = generated(client)
                assert shown > last
                last = shown
        complete(first)
        assert generated(first) == last + len(OUTPUT)  # those of the ended frontend are still counted
        with frontend(cores, checkpoint, tmp_path, 1, life=3) as again:  # two lives ended at their start
            assert generated(again) == generated(first) == last + len(OUTPUT)
            found = samples(again)
            assert sum(n for key, n in found.items() if key[0] == "atom:frontend_restarts_total") == 3
            complete(again)
            assert generated(again) == last + 2 * len(OUTPUT)


def test_a_broken_file_is_left_out(cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "frontend-0.metrics").write_bytes(b"\x93\x01")
    (tmp_path / "frontend-1.metrics").write_bytes(b"")
    with frontend(cores, checkpoint, tmp_path, 0) as client:
        complete(client)
        assert samples(client)["atom:http_responses_total", "200"] >= 1


def test_a_full_disk_does_not_end_the_metrics(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with frontend(cores, checkpoint, tmp_path / "missing", 0) as client:
        complete(client)
        assert samples(client)["atom:http_responses_total", "200"] >= 1


def test_files_that_cannot_be_read_in_time_are_an_error(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum without them would look as if the server had been restarted."""
    original = SharedMetrics._read_others

    def slow(self: SharedMetrics) -> list[Any]:
        time.sleep(1.5)
        return original(self)

    with frontend(cores, checkpoint, tmp_path, 0) as client:
        monkeypatch.setattr(SharedMetrics, "_read_others", slow)
        status, body = client.call("GET", "/metrics")
    assert status == 503 and "not read within 1 s" in body["error"]["message"]


class Control:
    """The supervisor's end of the control connection of frontend 0."""

    def __init__(self, directory: Path):
        self.endpoint = f"ipc://{directory}/control"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)

    def wait_for_frontend(self) -> None:
        assert self._socket.poll(int(DEADLINE_S * 1000))
        identity, frame = self._socket.recv_multipart()
        assert identity == control_identity(0)
        assert Decoder[GetEngines](GetEngines).decode(frame) == GetEngines(0)

    def send(self, engines: list[EngineAddress], ended: list[EngineEnded]) -> None:
        self._socket.send_multipart([control_identity(0), encode(Engines(engines, ended))])

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_the_supervisors_list_is_followed(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with (
        contextlib.closing(Control(tmp_path)) as control,
        running_frontend(cores, checkpoint, control=control.endpoint) as client,
        FakeCore(tmp_path, script, rank=1, life=1) as new,
    ):
        control.wait_for_frontend()
        control.send([cores[0].address], [EngineEnded(1, 0, "worker 0: killed by SIGKILL", is_final=True)])
        until(lambda: not is_up(client, 1))
        status, body = client.call("POST", "/v1/completions", {"prompt": "go", "data_parallel_rank": 1})
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        assert "killed by SIGKILL" in body["error"]["message"]
        control.send([cores[0].address, new.address], [])
        until(lambda: is_up(client, 1))
        assert complete(client, data_parallel_rank=1) == 200
        assert (len(cores[1].requests), len(new.requests)) == (0, 1)
        assert client.call("GET", "/server_info")[1]["engines"][1]["life"] == 1


def test_readiness_does_not_wait_for_an_engine_that_is_started_again(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with (
        contextlib.closing(Control(tmp_path)) as control,
        running_frontend(cores, checkpoint, control=control.endpoint) as client,
        FakeCore(tmp_path, script, rank=1, life=1, is_ready=False) as new,
    ):
        control.wait_for_frontend()
        control.send([cores[0].address, new.address], [EngineEnded(1, 0, "worker 0: killed by SIGKILL")])
        until(lambda: client.call("GET", "/server_info")[1]["engines"][1]["life"] == 1)
        assert not is_up(client, 1)
        assert ready(client) == (200, "")


def test_a_start_goes_on_without_an_engine_that_has_ended(
    cores: list[FakeCore], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    cores[1].freeze()
    with (
        contextlib.closing(Control(tmp_path)) as control,
        running_frontend(cores, checkpoint, wait=False, control=control.endpoint) as client,
    ):
        control.wait_for_frontend()
        until(lambda: is_up(client, 0))
        assert ready(client)[0] == 503
        control.send([cores[0].address], [EngineEnded(1, 0, "worker 0: killed by SIGKILL")])
        until(lambda: ready(client) == (200, ""))
        cores[1].frozen.clear()


def test_requests_of_a_session_go_to_one_engine(cores: list[FakeCore], checkpoint: Checkpoint) -> None:
    """Without a common prefix; another session's go to the other one."""
    body = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    with running_frontend(cores, checkpoint) as client:
        until(lambda: is_up(client, 0) and is_up(client, 1))
        for turn in range(3):
            for name, header in (("a", "X-Session-ID"), ("b", "X-Correlation-ID")):
                prompt = [3 + turn] * (40 + turn) if name == "a" else [9 + turn] * 40
                given = json.dumps({**body, "prompt": prompt}).encode()
                status, _, _ = client.exchange("POST", "/v1/completions", raw=given, headers={header: name})
                assert status == 200
        by_engine = [{request.session for request in core.requests} for core in cores]
        assert sum(map(len, by_engine)) == 2 and 0 not in by_engine[0] | by_engine[1]
        found = samples(client)
        hits = sum(found.get(("atom:session_hits_total", rank), 0) for rank in "01")
        assert hits == 4
