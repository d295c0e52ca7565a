"""Several failure domains: a failed one is restarted alone, and frontends learn of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.messages.admin import ServerState
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.supervisor import (
    Dead,
    Engines,
    GetEngines,
    Ready,
    SetServerState,
    Trial,
    WantTrial,
    control_identity,
)
from atom.shared.messages.worker import FromWorker, WorkerFailed
from atom.shared.utils.exit_status import ExitStatus
from atom.supervisor import StartError, Supervisor
from atom.supervisor import failure as failure_module
from atom.supervisor import supervisor as supervisor_module
from atom.supervisor.child import Child
from atom.supervisor.control import Control
from atom.supervisor.engine_group import EngineGroup
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.supervisor.placement import Placement
from atom.supervisor.process import Role
from tests.helpers.servers.domains import SLEEP, add_child, send, settings_in

SHARED_EXPERTS = EngineConfig(
    parallel=ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
    reliability=ReliabilityConfig(max_restarts=5),
)
CRASH = "raise SystemExit(3)"
STUBBORN = f"import signal; signal.signal(15, signal.SIG_IGN); open({{begun!r}}, 'w').close(); {SLEEP}"


class ScriptEngine(EngineGroup):
    """Life n runs `codes[n]`, or the last of them, as its core."""

    codes: tuple[str, ...] = (SLEEP,)

    def _launch(self, life: Life) -> None:
        for rank in self._ranks:
            add_child(life, self._core(rank), self.codes[min(self.number, len(self.codes) - 1)])


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(failure_module, "FIRST_DELAY_S", 0.05)
    with Supervisor() as made:
        yield made


def add_engines(
    supervisor: Supervisor, *engines: tuple[str, ...], max_restarts: int = 5
) -> list[ScriptEngine]:
    config = EngineConfig(reliability=ReliabilityConfig(max_restarts=max_restarts))
    placement = Placement(ParallelConfig(data_parallel_size=len(engines)))
    made = []
    for rank, codes in enumerate(engines):
        settings = replace(settings_in(supervisor.run_dir, supervisor._context, config), placement=placement)
        engine = ScriptEngine(range(rank, rank + 1), settings, 7)
        engine.codes = codes
        engine.start()
        made.append(engine)
    supervisor._engines = list(made)
    return made


def check_until(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        supervisor.check()


def failure_of(supervisor: Supervisor) -> StartError:
    with pytest.raises(StartError) as raised:
        check_until(supervisor, lambda: False)
    return raised.value


def test_before_serving_every_failure_is_an_error_with_its_status(supervisor: Supervisor) -> None:
    add_engines(supervisor, (SLEEP,), (f"import sys; {CRASH}",))
    error = failure_of(supervisor)
    assert str(error) == "core: ended with exit status 3" and error.status == ExitStatus.FAILURE


def test_it_waits_until_all_are_ready(supervisor: Supervisor) -> None:
    engines = add_engines(supervisor, (SLEEP,), (SLEEP,))
    for engine in engines:
        assert engine.life is not None
        send(engine.life, Ready("core", {"kv_tokens": 7}))
    supervisor.wait_ready()
    assert supervisor.details == {"kv_tokens": 7}


class ReadyFrontend:
    """A frontend that serves."""

    is_ready = is_alive = responds = accepts = True
    label = "frontend"
    life = None
    is_due = is_over = False

    def failure(self) -> None:
        return None

    def close(self) -> None:
        return None


def ready(engine: ScriptEngine) -> None:
    assert engine.life is not None
    send(engine.life, Ready("core"))


def test_an_engine_that_dies_in_its_first_start_while_another_one_serves_is_restarted(
    supervisor: Supervisor,
) -> None:
    first, second = add_engines(supervisor, (SLEEP,), (SLEEP,))
    supervisor._frontends = [ReadyFrontend()]  # type: ignore[list-item]
    ready(first)
    check_until(supervisor, lambda: first.is_ready)
    assert second.life is not None
    second.life.children["core"].process.kill()
    check_until(supervisor, lambda: second.number == 1)
    ready(second)
    supervisor.wait_ready()
    assert first.number == 0


@pytest.mark.parametrize(("serves", "max_restarts"), [(False, 5), (True, 0), (True, 2)])
def test_a_first_start_fails_if_nobody_serves_or_after_the_last_restart(
    supervisor: Supervisor, serves: bool, max_restarts: int
) -> None:
    first, second = add_engines(supervisor, (SLEEP,), (CRASH,), max_restarts=max_restarts)
    supervisor._frontends = [ReadyFrontend()] if serves else []  # type: ignore[list-item]
    ready(first)
    assert str(failure_of(supervisor)) == "core: ended with exit status 3"
    assert second.number == (max_restarts if serves else 0)


def test_what_the_user_must_change_ends_the_first_start_at_once(supervisor: Supervisor) -> None:
    first, second = add_engines(supervisor, (SLEEP,), (SLEEP,))
    supervisor._frontends = [ReadyFrontend()]  # type: ignore[list-item]
    ready(first)
    check_until(supervisor, lambda: first.is_ready)
    assert second.life is not None
    send(second.life, Dead("core", "too little memory", ExitStatus.RESOURCES))
    second.life.children["core"].process.kill()
    error = failure_of(supervisor)
    assert (error.status, second.number) == (ExitStatus.RESOURCES, 0)


def test_a_failed_engine_is_restarted_alone(supervisor: Supervisor) -> None:
    first, second = add_engines(supervisor, (SLEEP,), (CRASH, SLEEP))
    supervisor.restart_failed()
    check_until(supervisor, lambda: second.number == 1)
    assert first.number == 0 and first.life is not None and first.life.is_alive
    assert [(each.rank, each.life) for each in supervisor.engines] == [(0, 0), (1, 1)]
    assert supervisor.engines[1].endpoint.endswith("/engine-1.1/core")
    assert sorted(path.name for path in supervisor.run_dir.iterdir()) == ["engine-0.0", "engine-1.1"]


def test_engines_that_share_experts_are_restarted_together(supervisor: Supervisor) -> None:
    settings = settings_in(supervisor.run_dir, supervisor._context, SHARED_EXPERTS)
    group = ScriptEngine(range(2), settings, 7)
    supervisor._engines = [group]
    group.start()
    assert group.life is not None
    send(group.life, Ready("engine 1 core", {"kv_tokens": 7}, [5]))
    supervisor.check()
    assert not group.is_ready
    send(group.life, Ready("engine 0 core", {"kv_tokens": 8}, [6]))
    supervisor.wait_ready()
    assert group._num_blocks == {0: [6], 1: [5]}
    assert [each.endpoint.rpartition("/engines.0/")[2] for each in supervisor.engines] == ["core-0", "core-1"]
    supervisor.restart_failed()
    group.life.children["engine 1 core"].process.kill()
    check_until(supervisor, lambda: group.number == 1)
    assert [(each.rank, each.life) for each in supervisor.engines] == [(0, 1), (1, 1)]
    cause = "engine 1 core: killed by SIGKILL"
    assert [(each.rank, each.life, each.reason) for each in group.ended] == [(0, 0, cause), (1, 0, cause)]


def test_it_gives_up_once_no_engine_is_left(supervisor: Supervisor) -> None:
    first, second = add_engines(supervisor, (CRASH,), (SLEEP,), max_restarts=2)
    supervisor.restart_failed()
    check_until(supervisor, lambda: first.is_over)
    assert first.number == 2
    supervisor.check()
    assert second.life is not None
    second.life.children["core"].process.kill()
    check_until(supervisor, lambda: second.number == 1)
    second.codes = (CRASH,)
    second.life.children["core"].process.kill()
    text = str(failure_of(supervisor))
    assert text == "core: ended with exit status 3; the first of 3 failures in a row: core: killed by SIGKILL"


def test_while_stopping_nothing_is_restarted(supervisor: Supervisor) -> None:
    first, second = add_engines(supervisor, (SLEEP,), (SLEEP,))
    supervisor.restart_failed()
    supervisor.stop_frontends(0, hurry=lambda: False)
    assert supervisor.fault is None and first.life is not None and second.life is not None
    first.life.children["core"].process.kill()
    check_until(supervisor, lambda: first.is_over)
    second.life.children["core"].process.kill()
    check_until(supervisor, lambda: second.is_over)
    assert supervisor.fault is None, "no request has failed"


def test_an_engine_that_waits_for_its_restart_stays_down_while_stopping(supervisor: Supervisor) -> None:
    first, second = add_engines(supervisor, (CRASH,), (SLEEP,))
    supervisor.restart_failed()
    check_until(supervisor, lambda: first.life is None)
    supervisor.stop_frontends(0, hurry=lambda: False)
    for _ in range(5):
        supervisor.check()
    assert first.is_over and second.life is not None


def test_frontends_learn_of_ends_and_new_lives(supervisor: Supervisor) -> None:
    _, second = add_engines(supervisor, (SLEEP,), (SLEEP,))
    supervisor._control = Control(supervisor._context, f"ipc://{supervisor.run_dir}/control")
    supervisor.restart_failed()
    decoder = Decoder[Engines](Engines)
    with zmq.Context() as context, context.socket(zmq.DEALER) as frontend:
        frontend.setsockopt(zmq.IDENTITY, control_identity(4))
        frontend.connect(f"ipc://{supervisor.run_dir}/control")
        frontend.send(b"nonsense")
        frontend.send(encode(GetEngines(4)))

        def next_state() -> Engines:
            check_until(supervisor, lambda: frontend.poll(0))
            return decoder.decode(frontend.recv())

        state = next_state()
        assert [(each.rank, each.life) for each in state.engines] == [(0, 0), (1, 0)] and not state.ended
        assert second.life is not None
        second.life.children["core"].process.kill()
        state = next_state()
        assert [(each.rank, each.life) for each in state.engines] == [(0, 0)]
        (ended,) = state.ended
        assert (ended.rank, ended.life, ended.reason) == (1, 0, "core: killed by SIGKILL")
        state = next_state()
        assert [(each.rank, each.life) for each in state.engines] == [(0, 0), (1, 1)]
        assert state.ended == [ended] and state.state == ServerState()
        frontend.send(encode(SetServerState(ServerState("debug", True))))
        assert next_state().state == supervisor._engine_state().state == ServerState("debug", True)


def test_a_long_start_says_what_it_waits_for(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "STALL_NOTICE_S", 0.0)
    first, second = add_engines(supervisor, (SLEEP,), (SLEEP,))
    second.name = "engine 1"
    assert first.life is not None
    send(first.life, Ready("core"))
    check_until(supervisor, lambda: first.is_ready)

    def end_once_said() -> None:
        if "still waiting" in caplog.text:
            raise StartError("it is said")

    supervisor._on_turn = end_once_said
    with caplog.at_level("INFO"), pytest.raises(StartError, match="it is said"):
        supervisor.wait_ready()
    assert "still waiting for: engine 1" in caplog.text


def test_the_last_line_has_the_first_cause_of_failures_in_a_row(supervisor: Supervisor) -> None:
    add_engines(supervisor, (CRASH, "raise SystemExit(4)", "raise SystemExit(5)"), max_restarts=2)
    supervisor.restart_failed()
    assert str(failure_of(supervisor)) == (
        "core: ended with exit status 5; the first of 3 failures in a row: core: ended with exit status 3"
    )


def test_an_administrator_restarts_engines_one_after_the_other(supervisor: Supervisor) -> None:
    """Frontends first learn that an engine leaves, and that no request has ended it."""
    engines = add_engines(supervisor, (SLEEP, SLEEP), (SLEEP, SLEEP))
    for engine in engines:
        assert engine.life is not None
        send(engine.life, Ready("core"))
    supervisor.restart_failed()
    check_until(supervisor, lambda: all(engine.is_ready for engine in engines))
    supervisor.restart_engines()
    assert supervisor.engine_state.to_restart == [0, 1]
    for place, engine in enumerate(engines):
        check_until(supervisor, lambda engine=engine: engine.number == 1)
        assert [each.number for each in engines] == [1, place]
        (ended,) = engine.ended
        assert (ended.life, ended.is_planned, ended.is_final) == (0, True, False)
        supervisor.check()
        assert [each.number for each in engines] == [1, place]  # the next one waits for it
        assert engine.life is not None
        send(engine.life, Ready("core"))
    check_until(supervisor, lambda: not supervisor.engine_state.to_restart)
    assert all(engine.is_ready for engine in engines)


def test_restarts_of_engines_that_an_upgrade_ended_are_forgotten(supervisor: Supervisor) -> None:
    (engine,) = add_engines(supervisor, (SLEEP, SLEEP, SLEEP))
    assert engine.life is not None
    send(engine.life, Ready("core"))
    supervisor.restart_failed()
    check_until(supervisor, lambda: engine.is_ready)
    supervisor.restart_engines()
    check_until(supervisor, lambda: engine.number == 1)
    supervisor.leave()
    supervisor.check()
    supervisor.come_back()  # the server that took over has died
    assert engine.life is not None
    send(engine.life, Ready("core"))
    check_until(supervisor, lambda: engine.is_ready)
    supervisor.restart_engines()
    check_until(supervisor, lambda: engine.number == 2)


def test_one_frontend_at_a_time_tries_requests(supervisor: Supervisor) -> None:
    """The turn of one that ends, or that comes back, passes on."""
    add_engines(supervisor, (SLEEP,))
    control = f"ipc://{supervisor.run_dir}/control"
    supervisor._control = Control(supervisor._context, control)
    decoder = Decoder[Engines](Engines)
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:

        def trial_is(frontend: zmq.Socket[bytes], *wanted: int) -> None:
            check_until(supervisor, lambda: frontend.poll(0))
            assert decoder.decode(frontend.recv()).trial == Trial(*wanted)

        for index, frontend in enumerate((first, second)):
            frontend.setsockopt(zmq.IDENTITY, control_identity(index))
            frontend.connect(control)
            frontend.send(encode(GetEngines(index)))
            trial_is(frontend)
        first.send(encode(WantTrial(0, 1)))
        for frontend in (first, second):
            trial_is(frontend, 0, 1)
        second.send(encode(WantTrial(1, 1)))
        check_until(supervisor, lambda: supervisor._trials._waiting)
        first.send(encode(WantTrial(0, 0)))
        for frontend in (first, second):
            trial_is(frontend, 1, 1)
        second.send(encode(GetEngines(1)))
        trial_is(second, 1, 1)
        trial_is(first)


def test_a_frontend_that_is_gone_does_not_disturb(supervisor: Supervisor) -> None:
    (engine,) = add_engines(supervisor, (SLEEP,))
    control = supervisor._control = Control(supervisor._context, f"ipc://{supervisor.run_dir}/control")
    with zmq.Context() as context, context.socket(zmq.DEALER) as frontend:
        frontend.setsockopt(zmq.IDENTITY, control_identity(0))
        frontend.connect(f"ipc://{supervisor.run_dir}/control")
        frontend.send(encode(GetEngines(0)))
        check_until(supervisor, lambda: frontend.poll(0))
    deadline = time.monotonic() + 60
    while control._frontends:
        assert time.monotonic() < deadline
        supervisor._publish()
    assert engine.life is not None and engine.life.is_alive


def test_a_core_receives_why_its_worker_died(supervisor: Supervisor) -> None:
    (engine,) = add_engines(supervisor, (SLEEP,))
    life = engine.life
    assert life is not None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as workers:
        workers.bind(life.endpoint("workers"))
        dead = Child("worker 3", Role.WORKER, life.children["core"].process, worker=3)
        engine.end(Failure("killed by SIGKILL", "worker 3: killed by SIGKILL", child=dead))
        assert workers.poll(60_000)
        _, frame = workers.recv_multipart()
    assert Decoder[FromWorker](FromWorker).decode(frame) == WorkerFailed(3, "killed by SIGKILL")
    assert not life.is_alive and engine.life is None


def test_close_ends_all_and_removes_the_directory(supervisor: Supervisor, tmp_path: Path) -> None:
    (engine,) = add_engines(supervisor, (STUBBORN.format(begun=str(tmp_path / "begun")),))
    assert supervisor.run_dir.stat().st_mode & 0o777 == 0o700
    assert engine.life is not None
    process = engine.life.children["core"].process
    supervisor.close()
    assert process.returncode is not None and not supervisor.run_dir.exists()
    supervisor.close()


def test_a_missing_model_is_one_line(supervisor: Supervisor) -> None:
    with pytest.raises(StartError, match="^--model /no/such/place: no such path") as raised:
        supervisor.prepare(ModelConfig(model="/no/such/place"))
    assert "\n" not in str(raised.value)
    assert raised.value.status == ExitStatus.MODEL


def test_an_engine_that_does_not_stop_is_killed_and_named(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atom.supervisor.supervisor.ENGINE_STOP_S", 0.3)
    begun = tmp_path / "begun"
    (engine,) = add_engines(supervisor, (STUBBORN.format(begun=str(begun)),))
    assert engine.life is not None
    process = engine.life.children["core"].process
    check_until(supervisor, begun.exists)  # it ignores SIGTERM from then on
    send(engine.life, Ready("core"))
    supervisor.check()
    supervisor.close()
    assert process.returncode == -9
    assert [record.message for record in caplog.records] == ["not ended within 0 s, and killed: core"]


def test_the_configured_log_level_is_what_frontends_start_with(supervisor: Supervisor) -> None:
    config = EngineConfig(observability=ObservabilityConfig(log_level="warning"))
    supervisor.gather_nodes(config, Checkpoint("/m", "LlamaForCausalLM", "llama", {}, "float32", 9, 9))
    assert supervisor.engine_state.state == ServerState("warning")
