"""The engine core as a real process, between a real frontend socket and simulated workers."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from atom.shared.config.model import ModelConfig
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStalled,
    CoreStats,
    FinishReason,
    GetStats,
    Hello,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.shared.messages.profile import Profile, ProfileResult, RankTrace
from atom.shared.messages.resume import Claim, Claimed, Resumable
from atom.shared.messages.supervisor import Dead, Heartbeat
from atom.shared.messages.worker import (
    Loaded,
    Shutdown,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerReady,
)
from tests.helpers.engine.core_driver import GREEDY, VOCABULARY
from tests.helpers.engine.core_rig import (
    CONFIG,
    DEADLINE_S,
    PROMPTS,
    RANKS,
    SPEC,
    Engine,
    Peer,
    collect,
    request,
)
from tests.helpers.engine.simulated_worker import undisturbed


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    engine = Engine(directory)
    yield engine
    engine.close()


def test_from_start_to_sigterm(engine: Engine) -> None:
    early = engine.frontend(0)
    detail = engine.start()
    assert detail == {"kv_tokens": 128, "max_model_len": 100, "num_blocks": "32"}
    assert early.receive() == CoreReady(100, 128, [1000, 1001])
    late = engine.frontend(1)
    assert isinstance(late.receive(), CoreReady)

    prompts = {1: [1, 2, 3], 2: list(range(20)), 3: [4]}
    early.send(request(1, prompts[1], 9))
    late.send(request(2, prompts[2], 5))
    late.send(request(3, prompts[3], 7))
    early_got: dict[int, list[int]] = {}
    late_got: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}

    def done() -> bool:
        collect(early, early_got, reasons)
        collect(late, late_got, reasons)
        return len(reasons) == 3

    engine.work_until(done)
    assert early_got == {1: undisturbed(prompts[1], 9, set(), VOCABULARY)}
    assert late_got == {
        2: undisturbed(prompts[2], 5, set(), VOCABULARY),
        3: undisturbed(prompts[3], 7, set(), VOCABULARY),
    }
    early.send(GetStats())
    stats = early.receive()
    assert isinstance(stats, CoreStats)
    assert (stats.generated_tokens, stats.running, stats.kv_blocks_used) == (21, 0, 0)
    assert stats.overlapped_steps > 0

    engine.process.send_signal(signal.SIGTERM)
    assert [worker.receive() for worker in engine.workers] == [Shutdown(), Shutdown()]
    assert engine.exit_status() == 0
    assert not early.has_message(0)


def test_no_tensor_library_is_loaded(engine: Engine) -> None:
    engine.start()
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "xxhash" in maps and "libtorch" not in maps and "_multiarray_umath" not in maps


def test_a_refused_request_gets_a_response_while_nothing_runs(engine: Engine) -> None:
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    frontend.send(request(1, [1] * 99, 50))
    deltas = frontend.receive()
    assert (
        deltas.finished[0].reason is FinishReason.ERROR
        and "context of 100 tokens" in deltas.finished[0].message
    )


@pytest.fixture
def traced(directory: Path) -> Iterator[Engine]:
    engine = Engine(directory, replace(CONFIG, observability=ObservabilityConfig(torch_profiler_dir="x")))
    yield engine
    engine.close()


def test_a_profile_goes_to_all_ranks_and_its_result_to_the_requesting_frontend(traced: Engine) -> None:
    traced.start()
    asker, other = traced.frontend(0), traced.frontend(1)
    asker.receive(), other.receive()
    asker.send(Profile(True, 7))
    assert [worker.receive() for worker in traced.workers] == [Profile(True, 7)] * RANKS
    other.send(Profile(True, 8))
    refused = other.receive()
    assert isinstance(refused, ProfileResult) and refused.number == 8 and "being started" in refused.refusal
    for rank, worker in enumerate(traced.workers):
        worker.send(RankTrace(rank, True))
    assert asker.receive() == ProfileResult(7, True, [RankTrace(0, True), RankTrace(1, True)])
    other.send(request(1, [1, 2], 3))
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}

    def done() -> bool:
        collect(other, tokens, reasons)
        return bool(reasons)

    traced.work_until(done)
    assert tokens == {1: undisturbed([1, 2], 3, set(), VOCABULARY)}


def test_when_one_rank_cannot_record_all_stop(traced: Engine) -> None:
    traced.start()
    frontend = traced.frontend(0)
    frontend.receive()
    frontend.send(Profile(True, 1))
    assert [worker.receive() for worker in traced.workers] == [Profile(True, 1)] * RANKS
    traced.workers[0].send(RankTrace(0, True))
    traced.workers[1].send(RankTrace(1, True, error="no space"))
    assert [worker.receive() for worker in traced.workers] == [Profile(False)] * RANKS
    assert frontend.receive().error == "worker 1: no space"


def test_without_a_directory_profiles_are_refused_by_the_core(engine: Engine) -> None:
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    frontend.send(Profile(True, 1))
    assert "--torch-profiler-dir" in frontend.receive().refusal
    assert not engine.workers[0].has_message(0.1)


def test_the_failure_of_a_worker_ends_the_core(engine: Engine) -> None:
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    engine.workers[1].send(WorkerFailed(1, "out of memory"))
    assert frontend.receive() == CoreDead("worker 1: out of memory")
    assert engine.report() == Dead("core", "worker 1: out of memory")
    assert engine.exit_status() == 1


def test_a_supervisor_that_is_stopped_learns_of_a_failure(engine: Engine) -> None:
    frontend = engine.frontend(0)
    with engine.without_supervisor():
        engine.workers[0].send(WorkerFailed(0, "model.safetensors is damaged"))
        assert isinstance(frontend.receive(), CoreDead)
        time.sleep(2.5)
    assert engine.report() == Dead("core", "worker 0: model.safetensors is damaged")
    assert engine.exit_status() == 1


def test_a_failure_at_start_reaches_a_waiting_frontend(engine: Engine) -> None:
    frontend = engine.frontend(0)
    assert engine.supervisor.receive() == Heartbeat("core")  # it waits for its workers now
    assert not frontend.has_message(0.5), "a message before the core is ready"
    engine.workers[0].send(WorkerFailed(0, "model.safetensors is damaged"))
    assert engine.report() == Dead("core", "worker 0: model.safetensors is damaged")
    assert frontend.receive() == CoreDead("worker 0: model.safetensors is damaged")
    assert engine.exit_status() == 1


def test_a_result_that_fits_no_step_ends_the_core(engine: Engine) -> None:
    engine.start()
    engine.workers[0].send(WorkerReady(0))
    assert engine.report() == Dead("core", "a worker sent WorkerReady unexpectedly")
    assert engine.exit_status() == 1


def test_sigterm_while_the_model_loads(engine: Engine) -> None:
    assert engine.supervisor.receive() == Heartbeat("core")  # it waits for its workers now
    engine.workers[0].send(Loaded(0, [SPEC], 10_000, 1))
    frontend = engine.frontend(0)
    assert not frontend.has_message(0.5), "a message before the core is ready"
    engine.process.send_signal(signal.SIGTERM)
    assert engine.workers[0].receive() == Shutdown()
    assert engine.exit_status() == 0


def test_a_context_that_does_not_fit_is_one_clear_line(directory: Path) -> None:
    engine = Engine(directory, replace(CONFIG, model=ModelConfig(max_model_len=200)))
    try:
        for rank, worker in enumerate(engine.workers):
            worker.send(Loaded(rank, [SPEC], 10_000, 1))
        dead = engine.report()
        assert isinstance(dead, Dead)
        assert dead.reason.startswith("max_model_len 200 does not fit the KV cache of 128 tokens")
        assert engine.exit_status() == 1
    finally:
        engine.close()


def test_the_requests_of_a_frontend_that_is_gone_are_aborted(engine: Engine) -> None:
    engine.start()
    leaver, stayer = engine.frontend(0), engine.frontend(1)
    leaver.receive()
    stayer.receive()
    leaver.send(request(1, [1, 2, 3], 90))
    engine.work_until(lambda: leaver.has_message(0))
    leaver.close()
    stats: list[CoreStats] = []

    def idle() -> bool:
        time.sleep(0.01)  # the core has a second to notice it
        stayer.send(GetStats())
        stats.append(stayer.receive())
        return stats[-1].running == 0

    engine.work_until(idle)
    assert stats[-1].generated_tokens < 90
    stayer.send(request(2, [1, 2, 3], 4))
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}

    def done() -> bool:
        collect(stayer, tokens, reasons)
        return bool(reasons)

    engine.work_until(done)
    assert tokens == {2: undisturbed([1, 2, 3], 4, set(), VOCABULARY)}


def test_abort_stops_the_tokens(engine: Engine) -> None:
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    frontend.send(request(1, [1, 2, 3], 90))
    engine.work_until(lambda: frontend.has_message(0))
    frontend.send(Abort([1, 77]))
    at_abort = stats_after_tokens_of_one(frontend)
    assert (at_abort.running, at_abort.waiting) == (0, 0)
    assert engine.work_until_quiet() <= 2, "steps were sent after the abort"
    deadline = time.monotonic() + DEADLINE_S
    while (after := stats_after_tokens_of_one(frontend)).kv_blocks_used:  # the last result is on its way
        assert time.monotonic() < deadline, "blocks of the aborted request are still in use"
    assert after.steps == at_abort.steps
    assert not frontend.has_message(0.1)


def test_a_frontend_that_claims_its_own_stream_gets_no_token_twice(engine: Engine) -> None:
    """A claim and the result of a step are processed together: the core was stopped as they came."""
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    prompt = [1, 2, 3]
    asked = request(1, prompt, 12)
    frontend.send(msgspec.structs.replace(asked, resumable=Resumable("k", b"form", 1, 1)))
    got: list[int] = []
    claimed = [0]

    def done() -> bool:
        engine.process.send_signal(signal.SIGCONT)
        while frontend.has_message(0.02):
            message = frontend.receive()
            if isinstance(message, Claimed):
                claimed[0] += 1
                (part,) = message.requests
                for sequence in part.sequences:
                    got[:] = unpack_ids(sequence.output_ids)
            else:
                got.extend(unpack_ids(message.token_ids))
                if message.finished:
                    return True
        engine.process.send_signal(signal.SIGSTOP)
        frontend.send(Claim(1, "k", ""))
        return False

    engine.work_until(done)
    assert got == undisturbed(prompt, 12, set(), VOCABULARY)
    assert claimed[0] > 8


def stats_after_tokens_of_one(frontend: Peer) -> CoreStats:
    """Tokens that were ready before may still come first, or right after the abort."""
    frontend.send(GetStats())
    while not isinstance(message := frontend.receive(), CoreStats):
        assert message.request_ids == [1]
    return message


def test_undecodable_frames_of_a_frontend_do_not_disturb_others(engine: Engine) -> None:
    engine.start()
    hostile, decent = engine.frontend(0), engine.frontend(1)
    hostile.receive()
    decent.receive()
    decent.send(request(1, [1, 2, 3], 20))
    whole = encode(request(2, [1], 5))
    for frame in (b"", b"\xc1", b"\0" * 4096, whole[:-3], whole.replace(b"\x02", b"\x63", 1)):
        hostile.send_frames(frame)
    hostile.send_frames(whole, whole)
    hostile.send(AddRequest([3], b"12345", 5, GREEDY))
    hostile.send(AddRequest([4], pack_ids([1]), 5, msgspec.structs.replace(GREEDY, seed=-1)))
    refusals = [hostile.receive().finished[0] for _ in range(2)]
    assert [refusal.request_id for refusal in refusals] == [3, 4]
    assert "seed must be in" in refusals[1].message
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}

    def done() -> bool:
        collect(decent, tokens, reasons)
        return bool(reasons)

    engine.work_until(done)
    assert tokens == {1: undisturbed([1, 2, 3], 20, set(), VOCABULARY)}


def test_log_probabilities_and_times_reach_the_frontend(engine: Engine) -> None:
    engine.start()
    frontend = engine.frontend(0)
    frontend.receive()
    sampling = msgspec.structs.replace(GREEDY, logprobs=1)
    PROMPTS.append(list(range(20)))
    frontend.send(
        AddRequest([1], pack_ids(range(20)), 1, sampling, prompt_logprobs=0)
    )  # 16 tokens fit a step
    engine.work_until(lambda: frontend.has_message(0))
    first_chunk = frontend.receive()
    assert (first_chunk.request_ids, [chunk.start for chunk in first_chunk.prompt_logprobs]) == ([], [1])
    engine.work_until(lambda: frontend.has_message(0))
    last = frontend.receive()
    assert [(chunk.owner, chunk.start) for chunk in last.prompt_logprobs] == [(1, 17)]
    assert last.logprobs.indices == [0] and unpack_ids(last.logprobs.table.ids)[:1] == unpack_ids(
        last.token_ids
    )
    assert last.first[0].queued_s >= 0.0 and last.first[0].prefill_s > 0.0


def test_a_frontend_that_does_not_read_is_dropped_and_notified(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(directory)  # no fixture, whose log is not that of the test
    try:
        check_dropped(engine, lambda: capfd.readouterr().err)
    finally:
        engine.close()


def check_dropped(engine: Engine, new_log: Callable[[], str]) -> None:
    def all_workers_live() -> None:
        for rank, worker in enumerate(engine.workers):
            worker.send(WorkerHeartbeat(rank))

    engine.start()
    sleeper, reader = engine.frontend(0), engine.frontend(1)
    assert isinstance(sleeper.receive(), CoreReady) and isinstance(reader.receive(), CoreReady)
    too_long = request(1, [1] * 2000, 1)
    for number in range(20_000):  # the response of each is a refusal
        sleeper.send(too_long)
        if number % 1_000 == 0:
            all_workers_live()
    deadline, log = time.monotonic() + DEADLINE_S, new_log()
    while "frontend 0 is gone or does not read its tokens" not in log:
        assert time.monotonic() < deadline, log
        all_workers_live()
        time.sleep(0.05)
        log += new_log()
    responses: list[object] = []
    while not responses or not isinstance(responses[-1], CoreDead):
        assert time.monotonic() < deadline, "the dropped frontend is not told"
        all_workers_live()
        sleeper.send(GetStats())  # earlier answers may have found no room
        while sleeper.has_message(0.2):
            responses.append(sleeper.receive())
    assert 0 < sum(isinstance(response, TokenDeltas) for response in responses) < 20_000
    assert responses[-1] == CoreDead("this frontend did not read its tokens in time")
    reader.send(GetStats())
    assert isinstance(reader.receive(), CoreStats)
    sleeper.send(Hello(0))
    while (answer := sleeper.receive()) == responses[-1]:  # to the last of the questions
        continue
    assert isinstance(answer, CoreReady)


def until_received(peer: Peer, wanted: CoreReady | str, engine: Engine, *living: int) -> None:
    """Send the heartbeats of the living workers until the peer gets this message, or such a CoreStalled.

    Another one may come before, if this test was itself too slow with a heartbeat.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline, f"not received: {wanted}"
        for rank in living:
            engine.workers[rank].send(WorkerHeartbeat(rank))
        if not peer.has_message(0.1):
            continue
        message = peer.receive()
        if not isinstance(wanted, str):
            is_wanted = message == wanted
        else:
            is_wanted = isinstance(message, CoreStalled) and bool(re.fullmatch(wanted, message.reason))
        if is_wanted:
            return


def started_with(directory: Path, **timeouts: float) -> Engine:
    engine = Engine(directory, replace(CONFIG, reliability=ReliabilityConfig(**timeouts)))
    engine.start()
    return engine


def test_a_hung_step_is_detected_while_requests_arrive(directory: Path) -> None:
    engine = started_with(directory, step_timeout=6.0)
    try:
        frontend = engine.frontend(0)
        frontend.receive()
        frontend.send(request(1, [1, 2, 3], 9))
        engine.workers[0].receive()  # the step that is never finished
        deadline = time.monotonic() + DEADLINE_S
        number = 2
        until_received(frontend, "a step has run for 1 s", engine, 0, 1)
        while not frontend.has_message(0.05):  # well below the time of a quiet poll
            assert time.monotonic() < deadline, "the hung step was not detected"
            frontend.send(request(number, [1, 2, 3], 9))
            frontend.send(Abort([number]))
            number += 1
            for rank, worker in enumerate(engine.workers):
                worker.send(WorkerHeartbeat(rank))
        reason = "the workers have not finished a step for 6 s"
        assert frontend.receive() == CoreDead(reason)
        assert engine.report() == Dead("core", reason, is_hang=True)
        assert engine.exit_status() == 1
        note = (directory / "core.stacks").read_text()
        assert re.search(
            r"^last step sent: \d, 2 in flight, 1 rows, 1 tokens, 0 drafts a row; rows \[0\]", note
        )
        assert re.search(r"sequence 0: \w+, 3 prompt tokens, \d generated", note)
    finally:
        engine.close()


def test_a_late_step_is_reported_until_it_is_done(directory: Path) -> None:
    engine = started_with(directory, step_timeout=12.0)
    try:
        frontend = engine.frontend(0)
        ready = frontend.receive()
        frontend.send(request(1, [1, 2, 3], 9))
        until_received(frontend, "a step has run for 2 s", engine, 0, 1)
        engine.work_until(lambda: frontend.has_message(0) and frontend.receive() == ready)
    finally:
        engine.close()


def test_an_unresponsive_worker_is_reported_until_it_responds_again(directory: Path) -> None:
    engine = started_with(directory, hang_timeout=12.0)
    try:
        frontend = engine.frontend(0)
        ready = frontend.receive()
        assert isinstance(ready, CoreReady)
        until_received(frontend, r"worker 1 has not responded for \d+ s", engine, 0)
        late = engine.frontend(1)
        assert isinstance(late.receive(), CoreStalled)
        for each in (frontend, late):
            until_received(each, ready, engine, 0, 1)
        late.send(GetStats())
        assert isinstance(late.receive(), CoreStats)
    finally:
        engine.close()


def test_a_worker_that_hangs_while_it_loads_ends_the_core(directory: Path) -> None:
    engine = Engine(directory, replace(CONFIG, reliability=ReliabilityConfig(step_timeout=2.0)))
    try:
        engine.workers[1].send(WorkerHeartbeat(1))
        deadline = time.monotonic() + DEADLINE_S
        while engine.process.poll() is None:
            assert time.monotonic() < deadline, "the hung worker was not detected"
            engine.workers[0].send(WorkerHeartbeat(0))
            time.sleep(0.05)
        assert engine.report() == Dead("core", "worker 1 has not responded for 2 s", is_hang=True)
        assert engine.exit_status() == 1
        assert not engine.workers[0].has_message(0.1), "the supervisor kills the others after their stacks"
    finally:
        engine.close()


def test_a_hung_worker_ends_the_core(directory: Path) -> None:
    engine = started_with(directory, hang_timeout=3.0)
    try:
        frontend = engine.frontend(0)
        messages = [frontend.receive()]
        deadline = time.monotonic() + DEADLINE_S
        while not isinstance(messages[-1], CoreDead):
            assert time.monotonic() < deadline, "the hung worker was not detected"
            engine.workers[0].send(WorkerHeartbeat(0))
            if frontend.has_message(0.01):
                messages.append(frontend.receive())
        assert [type(message) for message in messages[:2]] == [CoreReady, CoreStalled]
        assert messages[-1] == CoreDead("worker 1 has not responded for 3 s")
        assert engine.report() == Dead("core", "worker 1 has not responded for 3 s", is_hang=True)
        assert engine.exit_status() == 1
    finally:
        engine.close()
