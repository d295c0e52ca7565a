"""The status page's files and its data over HTTP."""

import asyncio
import hashlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, CoreStats, FinishReason
from atom.shared.messages.launch import FrontendLaunch
from frontend.http.lifecycle import Lifecycle
from frontend.metrics.metrics import Metrics, Progress, RunningRequest
from frontend.metrics.shared_metrics import MAX_SHOWN, SharedMetrics
from frontend.status.events import EventLog
from frontend.status.feed import MAX_LISTENERS, StatusFeed
from frontend.status.latency import Window, quantiles, summed
from frontend.status.records import Rank
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import CONFIG, DEADLINE_S, Client, running_frontend
from tests.helpers.source import ROOT

IDS = tiny_tokenizer.tokenizer().encode("one two three", add_special_tokens=False)
CHECKPOINT = Checkpoint("", "LlamaForCausalLM", "llama", {}, "float32", 360, 2048)
KEY = "secret"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
FILES = sorted(path.name for path in (ROOT / "frontend/static").iterdir())
TEXT = "".join((ROOT / "frontend/static" / name).read_text(encoding="utf-8") for name in FILES)


def script(request: AddRequest) -> Script:
    """Three words; of a request for 1000 tokens, no end."""
    endless = request.max_tokens == 1000
    return Script(IDS, None if endless else FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FakeCore]]:
    directory = tmp_path_factory.mktemp("cores")
    with FakeCore(directory, script) as first, FakeCore(directory, script, rank=1) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def client(cores: list[FakeCore], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A frontend that wants a key."""
    directory = tmp_path_factory.mktemp("shared")
    checkpoint = tiny_tokenizer.checkpoint(directory)
    server = ServerConfig(api_key=KEY, max_queued_requests=0)
    with running_frontend(cores, checkpoint, server, run_dir=str(directory)) as client:
        yield client


def state(client: Client) -> Any:
    status, body, headers = client.exchange("GET", "/status", headers=AUTHORIZED)
    assert status == 200 and headers["cache-control"] == "no-store"
    return json.loads(body)


def until(client: Client, condition: Callable[[Any], object]) -> Any:
    """The first state for which `condition` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(found := state(client)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


class Listener:
    """An open stream of events."""

    def __init__(self, client: Client):
        self._connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
        self._connection.request("GET", "/status/events", headers=AUTHORIZED)
        self.response = self._connection.getresponse()

    def next(self) -> tuple[str, Any]:
        """(event, data)."""
        event = self.response.readline().decode().removeprefix("event: ").strip()
        data = json.loads(self.response.readline().decode().removeprefix("data: "))
        assert self.response.readline() == b"\n"
        return event, data

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def listener_with_a_place(client: Client) -> Listener:
    """Waits until the server has noticed the ends of others."""
    deadline = time.monotonic() + DEADLINE_S
    while (listener := Listener(client)).response.status != 200:
        listener.close()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return listener


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES if name != "index.html")])
def test_the_files_are_public_and_cached_and_closed_to_other_hosts(client: Client, path: str) -> None:
    status, body, headers = client.exchange("GET", path)
    assert (status, headers["cache-control"]) == (200, "no-cache")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert len(body) == int(headers["content-length"])
    again = client.exchange("GET", path, headers={"If-None-Match": f'W/"x", {headers["etag"]}'})
    assert again[:2] == (304, b"") and again[2]["etag"] == headers["etag"]
    assert client.exchange("GET", path, headers={"If-None-Match": '"x"'})[:2] == (200, body)


def test_a_file_that_is_not_there_is_an_error_object(client: Client) -> None:
    for name in ("none.js", "index.html", "..%2fapp.py", "%2e%2e"):
        status, body, _ = client.exchange("GET", f"/page/{name}", headers=AUTHORIZED)
        assert status == 404 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_the_files_load_nothing_from_elsewhere_and_insert_no_markup() -> None:
    assert re.findall(r"(?:src|href|from|import|url)\s*[=(]?\s*[\"']?(?:https?:)?//", TEXT) == []
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|DOMParser|document\.write"
    assert not re.search(rf"{markup}|\beval\(|new Function|localStorage.*key", TEXT)


def test_the_vendored_library_is_the_recorded_one() -> None:
    record = (ROOT / "frontend/static/markdown-it.LICENSE.txt").read_text(encoding="utf-8")
    library = (ROOT / "frontend/static/markdown-it.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == re.findall(r"^sha256 (\w+)$", record, re.MULTILINE)[0]
    version = re.findall(rb"^/\*! markdown-it ([\d.]+) ", library)[0].decode()
    assert f"npm package markdown-it {version}, unchanged" in record


@pytest.mark.parametrize("path", ["/status", "/status/events", "/status/history/1h"])
def test_the_data_needs_the_key(client: Client, path: str) -> None:
    status, body, _ = client.exchange("GET", path)
    assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"


def test_the_whole_state(client: Client) -> None:
    found = until(client, lambda found: all(rank["kv_total"] for rank in found["tick"]["ranks"]))
    layout, tick = found["layout"], found["tick"]
    assert (layout["model"], layout["data_parallel_size"], layout["speculation"]) == ("org/tiny", 2, "ngram")
    assert KEY not in json.dumps(found)
    assert [(rank["state"], rank["kv_total"]) for rank in tick["ranks"]] == [("ready", 100)] * 2
    assert found["history"][-1] == tick["point"]
    assert {(event["kind"], event["rank"]) for event in found["events"]} >= {("ready", 0), ("ready", 1)}


def test_longer_ranges_are_kept(client: Client) -> None:
    for name, seconds in (("5m", 1), ("1h", 12), ("6h", 72)):
        status, body, headers = client.exchange("GET", f"/status/history/{name}", headers=AUTHORIZED)
        found = json.loads(body)
        assert (status, headers["cache-control"], found["range"]) == (200, "no-store", name)
        assert found["seconds_per_point"] == seconds and len(found["points"]) <= 300
    status, body, _ = client.exchange("GET", "/status/history/2h", headers=AUTHORIZED)
    assert status == 404 and "use one of 5m, 1h, 6h" in json.loads(body)["error"]["message"]


def test_memory_and_responses_by_status_are_shown(client: Client) -> None:
    assert client.exchange("GET", "/unknown", headers=AUTHORIZED)[0] == 404
    found = until(client, lambda found: found["tick"]["memory"] and "404" in found["tick"]["responses"])
    memory = found["tick"]["memory"]
    assert 0 < memory["used"] < memory["total"]


def shows_two(tick: Any) -> bool:
    """Two whole sequences, the latency of their first tokens, and an engine that has told of them in time."""
    is_whole = [row["tokens"] for row in tick["requests"]] == [len(IDS)] * 2
    return is_whole and tick["point"]["ttft"] and sum(rank["running"] for rank in tick["ranks"]) == 2


def test_requests_latencies_and_refusals_are_shown(client: Client, cores: list[FakeCore]) -> None:
    body = {"prompt": "go", "max_tokens": len(IDS)}
    assert client.exchange("POST", "/v1/completions", body, headers=AUTHORIZED)[0] == 200
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S) as endless:
        data = json.dumps({"prompt": "go on", "max_tokens": 1000, "n": 2, "stream": True})
        head = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}"
        endless.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{data}".encode())
        tick = until(client, lambda found: shows_two(found["tick"]))["tick"]
        row = tick["requests"][0]
        assert 0 <= row["age"] <= time.monotonic() - begun and row["prompt_tokens"] > 0
        assert row["rank"] in (0, 1) and row["queue"] is not None and not row["is_hidden"]
        assert row["rate"] is None or row["rate"] > 0
        assert row["id"] in {request.name for core in cores for request in core.requests}
        assert tick["num_requests"] == 2
        assert sorted(tick["point"]["ttft"]) == tick["point"]["ttft"]
        assert tick["finished"]["length"] >= 1
        assert client.exchange("POST", "/v1/completions", body, headers=AUTHORIZED)[0] == 429
    found = until(client, lambda found: found["tick"]["refused"] == 1 and not found["tick"]["requests"])
    assert [event["text"] for event in found["events"] if event["kind"] == "refused"] == [
        "1 refused: the server is full"
    ]


def test_listeners_get_the_state_then_ticks_and_are_bounded(client: Client, cores: list[FakeCore]) -> None:
    listeners = [Listener(client) for _ in range(MAX_LISTENERS)]
    try:
        assert {listener.response.status for listener in listeners} == {200}
        assert listeners[0].response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        with closing(Listener(client)) as one_more:
            assert one_more.response.status == 503 and one_more.response.getheader("Retry-After")
            assert "64 status pages" in json.loads(one_more.response.read())["error"]["message"]
        first = [listener.next() for listener in listeners]
        assert {event for event, _ in first} == {"state"}
        second = [listener.next() for listener in listeners]
        assert {event for event, _ in second} == {"tick"}
        assert second[0][1]["point"]["at"] > first[0][1]["tick"]["point"]["at"]
    finally:
        for listener in listeners:
            listener.close()


def test_the_death_of_a_rank_is_shown(client: Client, cores: list[FakeCore]) -> None:
    with closing(listener_with_a_place(client)) as listener:
        cores[1].die("worker 0: killed by SIGKILL")
        events: list[Any] = []
        while not any(event["kind"] == "restarting" for event in events):
            _, data = listener.next()
            events += data.get("tick", data)["events"]
    assert events[-1]["rank"] == 1 and "killed by SIGKILL" in events[-1]["text"]
    (dead,) = [rank for rank in state(client)["tick"]["ranks"] if rank["state"] != "ready"]
    assert (dead["rank"], dead["running"]) == (1, 0) and "SIGKILL" in dead["reason"]


def test_any_frontend_shows_the_requests_and_latencies_of_all(cores: list[FakeCore], tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    shared = {"num_frontends": 2, "run_dir": str(tmp_path)}
    with (
        running_frontend(cores[:1], checkpoint, index=0, **shared) as first,
        running_frontend(cores[:1], checkpoint, index=1, **shared) as second,
        socket.create_connection(("127.0.0.1", second.port), timeout=DEADLINE_S) as endless,
    ):
        fields = {"prompt": "go on", "max_tokens": 1000, "stream": True, "request_id": "of-the-second"}
        data = json.dumps(fields)
        head = f"Host: x\r\nContent-Length: {len(data)}"
        endless.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{data}".encode())
        found = until(first, lambda found: [row["tokens"] for row in found["tick"]["requests"]] == [len(IDS)])
        assert found["tick"]["requests"][0]["id"] == "cmpl-of-the-second"
        assert (found["tick"]["num_requests"], found["layout"]["num_frontends"]) == (1, 2)
        assert found["tick"]["point"]["ttft"]


def test_an_open_page_does_not_hold_up_a_stop(
    cores: list[FakeCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.app._CLEANUP_DEADLINE_S", DEADLINE_S)
    with running_frontend(cores[:1], tiny_tokenizer.checkpoint(tmp_path)) as client:
        listener = Listener(client)
        assert listener.next()[0] == "state"
        begun = time.monotonic()
    with closing(listener):
        listener.response.read()  # to its end, without an error
    assert time.monotonic() - begun < DEADLINE_S / 2


def test_a_server_without_the_page(cores: list[FakeCore], tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    with running_frontend(cores[:1], checkpoint, ServerConfig(disable_status_page=True)) as client:
        for path in ("/", "/page/index.html", "/status", "/status/events"):
            assert client.call("GET", path)[0] == 404


def feed_of(ranks: int) -> StatusFeed:
    """In front of `ranks` engines, all ready, with the longest list of requests."""
    metrics = Metrics()
    for rank in range(ranks):
        progress = Progress(arrived_at=1.0, prompt_tokens=10)
        metrics.engine(rank).advanced(progress, 1, now=2.0)
        metrics.engine(rank).advanced(progress, 1, now=2.5)
    link = SimpleNamespace(is_ready=True)

    async def stats(_: float) -> dict[int, CoreStats]:
        return {rank: CoreStats(*range(13), num_accepted_tokens_per_pos=[5, 3, 1]) for rank in range(ranks)}

    by_rank = {rank: SimpleNamespace(link=link, life=0) for rank in range(ranks)}
    client: Any = SimpleNamespace(
        engines=SimpleNamespace(get=by_rank.get, restarts={}, limits=None),
        settings=SimpleNamespace(num_ranks=ranks),
        control=SimpleNamespace(stats=stats),
    )
    rows = [RunningRequest(number, 0, 100, 10, time.monotonic()) for number in range(MAX_SHOWN)]
    shared = SharedMetrics("", 0, 0, metrics, lambda: 900, lambda count: rows[:count])
    launch = FrontendLaunch(CONFIG, ServerConfig(), CHECKPOINT, [], "", 0)
    return StatusFeed(launch, "tiny", client, shared, Lifecycle())


def test_a_page_that_missed_a_tick_gets_the_state_again() -> None:
    async def follow() -> list[str]:
        feed, kinds = feed_of(1), []
        with feed.listening():
            frames = feed.frames()
            for looks in (1, 1, 2, 1):
                for _ in range(looks):
                    await feed._look()
                kinds.append((await anext(frames)).split(b"\n")[0].decode())
            feed.close()
            kinds += [frame.decode() async for frame in frames]
        return kinds

    assert asyncio.run(follow()) == ["event: state", "event: tick", "event: state", "event: tick"]


def test_a_look_at_1024_engines_takes_little_of_the_event_loop() -> None:
    """CPU time of its thread; the sums are made in another one."""

    async def look() -> tuple[float, int]:
        feed, times = feed_of(1024), []
        with feed.listening():
            for _ in range(3):
                begun = time.thread_time()
                await feed._look()
                times.append(time.thread_time() - begun)
        return min(times), len(await feed.state())

    seconds, size = asyncio.run(look())
    assert seconds < 0.05 and size < 500_000


def test_quantiles_are_interpolated_inside_their_buckets() -> None:
    assert quantiles([1.0, 2.0, 4.0], [0, 0, 0, 0]) is None
    assert quantiles([1.0, 2.0, 4.0], [10, 10, 0, 0]) == pytest.approx((1.0, 1.8, 1.98))
    assert quantiles([1.0, 2.0], [0, 0, 5]) == (2.0, 2.0, 2.0)


def test_a_window_forgets() -> None:
    histogram = Metrics().engine(0).time_to_first_token
    histogram.observe(0.015)
    bounds, counts = histogram.bounds, summed([histogram])
    fresh, restarted = Window(2), Window(2)
    assert fresh.move([], summed([])) is None
    assert restarted.move(bounds, counts) is None  # counted before the first look
    seen = [fresh.move(bounds, counts) for _ in range(3)]
    assert seen[0] is not None and 0.01 < seen[0][0] < 0.02
    assert seen[0] == seen[1] and seen[2] is None
    fallen = Metrics().engine(0).time_to_first_token
    assert fresh.move(bounds, summed([fallen])) is None  # the figures of another frontend are missing


def test_an_event_for_each_change() -> None:
    log, metrics = EventLog(), Metrics(refused=7)
    ready = Rank(0, 0, "ready", "")
    assert [event.text for event in log.changes(1.0, [ready], metrics)] == ["ready"]
    assert log.changes(2.0, [ready], metrics) == []
    metrics.refused += 3
    stalled = Rank(0, 0, "stalled", "worker 0 is silent")
    events = log.changes(3.0, [stalled], metrics)
    assert [(event.kind, event.text) for event in events] == [
        ("stalled", "stalled: worker 0 is silent"),
        ("refused", "3 refused: the server is full"),
    ]
    assert [event.text for event in log.changes(4.0, [Rank(0, 1, "ready", "")], metrics)] == [
        "ready (life 1)"
    ]
