"""POST /start_profile and /stop_profile, with a scripted core."""

from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.profile import Profile, ProfileResult, RankTrace
from frontend.routes import profile
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import running_frontend

TRACES = [RankTrace(rank, False, f"/traces/rank_{rank}", "t.json.gz", 12, 1.23456) for rank in (0, 1)]


def response(message: Profile) -> ProfileResult:
    return ProfileResult(message.number, message.on, [] if message.on else TRACES)


def refusal(message: Profile) -> ProfileResult:
    return ProfileResult(message.number, message.on, refusal="profiling is on already")


def failure(message: Profile) -> ProfileResult:
    return ProfileResult(message.number, message.on, error="worker 1: no space")


def serving(core: FakeCore, directory: Path, profiler: bool = True, key: str | None = None) -> Any:
    traces = ObservabilityConfig(torch_profiler_dir="/traces" if profiler else None)
    checkpoint = tiny_tokenizer.checkpoint(directory)
    return running_frontend(core, checkpoint, ServerConfig(api_key=key), observability=traces)


def core_of(directory: Path, profile: Any) -> FakeCore:
    return FakeCore(directory, lambda request: Script([]), profile=profile)


def test_start_and_stop(tmp_path: Path) -> None:
    with core_of(tmp_path, response) as core, serving(core, tmp_path) as client:
        started = client.post("/start_profile")
        stopped = client.call("POST", "/stop_profile", raw=b"whatever a client sends")
    assert started == (200, {"status": "success", "message": "Profiling started"})
    assert stopped[0] == 200 and stopped[1]["message"] == "Profiling stopped"
    assert stopped[1]["traces"][1] == {
        "rank": 1,
        "trace_dir": "/traces/rank_1",
        "trace": "t.json.gz",
        "steps": 12,
        "elapsed": 1.235,
    }
    assert [message.on for message in core.profiles] == [True, False]
    assert len({message.number for message in core.profiles}) == 2


@pytest.mark.parametrize(
    ("reply", "status", "code", "words"),
    [(refusal, 409, "profiler_state", "on already"), (failure, 500, "profiler_failed", "worker 1: no space")],
)
def test_refusals_and_failures_of_the_core_are_errors(
    tmp_path: Path, reply: Any, status: int, code: str, words: str
) -> None:
    with core_of(tmp_path, reply) as core, serving(core, tmp_path) as client:
        got, body = client.post("/start_profile")
    assert (got, body["error"]["code"]) == (status, code)
    assert words in body["error"]["message"]


def test_without_a_directory_there_is_no_profiler(tmp_path: Path) -> None:
    with core_of(tmp_path, response) as core, serving(core, tmp_path, profiler=False) as client:
        for path in ("/start_profile", "/stop_profile"):
            status, body = client.post(path)
            assert (status, body["error"]["code"]) == (404, "no_profiler")
            assert "--torch-profiler-dir" in body["error"]["message"]
    assert core.profiles == []


def test_a_key_is_required(tmp_path: Path) -> None:
    with core_of(tmp_path, response) as core, serving(core, tmp_path, key="secret") as client:
        assert client.post("/start_profile")[0] == 401
        assert core.profiles == []
        headers = {"Authorization": "Bearer secret"}
        assert client.exchange("POST", "/start_profile", {}, headers=headers)[0] == 200
        assert client.exchange("GET", "/start_profile", headers=headers)[0] == 405


def test_the_death_of_the_core_ends_the_request(tmp_path: Path) -> None:
    def die(message: Profile) -> None:
        core.die("killed")

    core = core_of(tmp_path, die)
    with core, serving(core, tmp_path) as client:
        status, body = client.post("/stop_profile")
    assert (status, body["error"]["code"]) == (500, "engine_dead")


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
        (None, False),
    ],
)
def test_loopback_addresses(host: str | None, is_loopback: bool) -> None:
    assert profile._is_loopback(host) is is_loopback


def test_other_hosts_need_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_is_loopback", lambda host: False)
    with core_of(tmp_path, response) as core, serving(core, tmp_path) as client:
        status, body = client.post("/start_profile")
        assert (status, body["error"]["code"]) == (403, "profiler_needs_key")
        assert "--api-key" in body["error"]["message"]
    with core_of(tmp_path, response) as core, serving(core, tmp_path, key="secret") as client:
        headers = {"Authorization": "Bearer secret"}
        assert client.exchange("POST", "/start_profile", {}, headers=headers)[0] == 200
