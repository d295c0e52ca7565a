"""`python -m workers.main` as real processes, with this test as their core and supervisor."""

import contextlib
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import LogitsProcessors, LogprobTable, Sampling, pack_ids, unpack_ids
from atom.shared.messages.launch import WorkerLaunch
from atom.shared.messages.supervisor import Dead, Progress, ToSupervisor
from atom.shared.messages.worker import (
    AllocateKV,
    BatchResult,
    FromWorker,
    Loaded,
    ScheduledBatch,
    Shutdown,
    ToWorker,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerReady,
)
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import spawn
from benchmarks.ranks.rendezvous import open_rendezvous
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, engine_config, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import CoreSide, generate

DEADLINE_S = 90
BLOCKS, BLOCK_SIZE = 64, 4
PROMPT_LENGTHS = (21, 5, 40)


class Workers:
    """Worker processes of one engine, and the sockets that they connect to."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, directory: Path):
        self._context = zmq.Context()
        self.ranks = config.parallel.tensor_parallel_size
        self._core = self._bind(zmq.ROUTER, f"ipc://{directory}/core")
        self._core.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._supervisor = self._bind(zmq.PULL, f"ipc://{directory}/supervisor")
        self._from_worker: Decoder[FromWorker] = Decoder(FromWorker)
        self._to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor)
        with open_rendezvous(self.ranks) as places:
            self.processes = [
                spawn(
                    "workers.main",
                    WorkerLaunch(
                        config=config,
                        checkpoint=checkpoint,
                        rank=rank,
                        core=f"ipc://{directory}/core",
                        supervisor=f"ipc://{directory}/supervisor",
                        rendezvous=place,
                    ),
                    place.pass_fds if place else (),
                )
                for rank, place in enumerate(places)
            ]

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        socket.bind(endpoint)
        return socket

    @contextlib.contextmanager
    def without_supervisor(self) -> Iterator[None]:
        """No connection to the supervisor is made meanwhile; to be called before there is one."""
        endpoint = self._supervisor.getsockopt_string(zmq.LAST_ENDPOINT)
        self._supervisor.unbind(endpoint)
        yield
        self._supervisor.bind(endpoint)

    def send(self, message: ToWorker) -> None:
        for rank in range(self.ranks):
            self._core.send_multipart([rank.to_bytes(4, "little"), encode(message)])

    def receive(self) -> FromWorker:
        """The next message that is no heartbeat."""
        while True:
            _, frame = self._core.recv_multipart()
            message = self._from_worker.decode(frame)
            if not isinstance(message, WorkerHeartbeat):
                return message

    def supervisor_messages(self) -> list[ToSupervisor]:
        messages = []
        while self._supervisor.poll(200):
            messages.append(self._to_supervisor.decode(self._supervisor.recv()))
        return messages

    def start(self) -> list[Loaded]:
        loaded = [self.receive() for _ in range(self.ranks)]
        assert all(isinstance(each, Loaded) for each in loaded), loaded
        self.send(AllocateKV([BLOCKS], MAX_MODEL_LEN))
        ready = [self.receive() for _ in range(self.ranks)]
        assert sorted(ready, key=lambda each: each.rank) == [WorkerReady(r) for r in range(self.ranks)]
        return sorted(loaded, key=lambda each: each.rank)

    def execute(self, batch: ScheduledBatch) -> bytes:
        return self.result(batch).token_ids

    def result(self, batch: ScheduledBatch) -> BatchResult:
        self.send(batch)
        result = self.receive()
        assert isinstance(result, BatchResult) and result.step == batch.step, result
        return result

    def exit_statuses(self) -> list[int]:
        return [process.wait(DEADLINE_S) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def started(config: EngineConfig, checkpoint: Checkpoint, directory: Path) -> Iterator[Workers]:
    directory.mkdir(parents=True)
    workers = Workers(config, checkpoint, directory)
    try:
        yield workers
    finally:
        workers.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """9 query and 3 KV heads: two ranks hold unequal shares."""
    return save_tiny(tiny("llama-odd-gqa"), tmp_path_factory.mktemp("model"))[1]


def run(workers: Workers) -> list[list[int]]:
    prompts = [prompt_of(length, length) for length in PROMPT_LENGTHS]
    return generate(CoreSide(BLOCKS, BLOCK_SIZE), workers.execute, prompts, 24, chunk=16, stagger=2)


@dataclass
class Reported:
    """Ids and log probabilities of requests that use every feature of the sampler."""

    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, table: LogprobTable) -> None:
        self.ids += unpack_ids(table.ids) + unpack_ids(table.ranks)
        self.values += array("f", table.values)


def run_with_everything(workers: Workers) -> Reported:
    rules = LogitsProcessors(
        bad_words=[[1, 2]],
        min_tokens=5,
        end_ids=[7],
        bias_ids=pack_ids([9]),
        bias_values=[2.0],
        repetition_penalty=1.5,
        frequency_penalty=0.5,
    )
    core, reported = CoreSide(BLOCKS, BLOCK_SIZE), Reported()
    for row, length in enumerate(PROMPT_LENGTHS):
        sampling = Sampling(0.8, 0, 1.0, 0.0, row, logits_processors=rules if row % 2 else None, logprobs=2)
        core.add(row, prompt_of(length, length), sampling, prompt_logprobs=1)
    for _ in range(12):
        counts = {row: min(7, max(core.known[row] - core.computed[row], 1)) for row in core.tokens}
        result = workers.result(core.plan(counts))
        core.add_sampled(result.token_ids)
        reported.ids += unpack_ids(result.token_ids)
        for each in (*result.prompt_logprobs, *filter(None, [result.logprobs])):
            reported.add(each.table)
    return reported


def test_two_ranks_sample_the_same_tokens_as_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with started(engine_config(tp=1), checkpoint, tmp_path / "one") as workers:
        (whole,) = workers.start()
        expected, reported = run(workers), run_with_everything(workers)
        messages = workers.supervisor_messages()
        workers.send(Shutdown())
        assert workers.exit_statuses() == [0]
    with started(engine_config(tp=2), checkpoint, tmp_path / "two") as workers:
        parts = workers.start()
        assert run(workers) == expected
        again = run_with_everything(workers)
        workers.send(Shutdown())
        assert workers.exit_statuses() == [0, 0]
    assert len({token for ids in expected for token in ids}) >= 16
    assert again.ids == reported.ids and len(reported.values) > 2 * sum(PROMPT_LENGTHS)
    assert again.values == pytest.approx(reported.values, abs=1e-4)
    assert sum(part.weight_bytes for part in parts) < 1.1 * whole.weight_bytes
    phases = [(each.phase, each.done == each.total) for each in messages if isinstance(each, Progress)]
    assert ("Loading weights", True) in phases and ("Warming up", True) in phases


def test_sigterm_ends_a_worker_with_status_zero(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with started(engine_config(), checkpoint, tmp_path / "run") as workers:
        workers.start()
        workers.processes[0].terminate()
        assert workers.exit_statuses() == [0]


def test_a_failure_reaches_core_and_supervisor_in_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Also a supervisor that does not run for a while."""
    wrong = replace(checkpoint, architecture="MambaForCausalLM", model_type="mamba")
    with started(engine_config(), wrong, tmp_path / "run") as workers:
        with workers.without_supervisor():
            failed = workers.receive()
            time.sleep(2.5)
        assert isinstance(failed, WorkerFailed)
        assert failed.reason.startswith("architecture MambaForCausalLM is not supported; supported are: ")
        assert workers.exit_statuses() == [1]
        assert Dead("worker 0", failed.reason, ExitStatus.MODEL) in workers.supervisor_messages()


def test_a_batch_that_breaks_the_contract_ends_the_worker(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with started(engine_config(), checkpoint, tmp_path / "run") as workers:
        workers.start()
        workers.send(ScheduledBatch(1, [999]))
        failed = workers.receive()
        assert isinstance(failed, WorkerFailed) and "999" in failed.reason
        assert workers.exit_statuses() == [1]


def test_a_worker_ends_with_its_parent(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with started(engine_config(), checkpoint, tmp_path / "run") as workers:
        workers.start()
        workers.processes[0].stdin.close()
        assert workers.exit_statuses() == [1]


def test_torch_is_not_loaded_before_its_environment_is_set() -> None:
    script = "import sys, workers.main; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    assert output.strip() == "False"
