"""An engine core in a process of its own, between real sockets of a test and simulated workers."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import (
    AddRequest,
    FinishReason,
    FromCore,
    Hello,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.supervisor import Dead, Heartbeat, Ready, ToSupervisor
from atom.shared.messages.worker import (
    AllocateKV,
    FullAttentionSpec,
    Loaded,
    NewRow,
    ScheduledBatch,
    ToWorker,
    WorkerReady,
)
from atom.shared.utils.process import spawn
from tests.helpers.engine.core_driver import GREEDY, VOCABULARY
from tests.helpers.engine.simulated_worker import SimulatedWorker

DEADLINE_S = 60.0
RANKS = 2
SPEC = FullAttentionSpec(block_size=4, bytes_per_block=100)
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4, num_kv_blocks=32),
    scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
    parallel=ParallelConfig(tensor_parallel_size=RANKS),
)
CHECKPOINT = Checkpoint("", "LlamaForCausalLM", "llama", {}, "float32", VOCABULARY, max_model_len=100)


class Peer:
    """One socket of the test, with typed messages and a deadline on every wait."""

    def __init__(self, socket: "zmq.Socket[bytes]", union: Any):
        self._socket = socket
        self._decoder: Decoder[Any] = Decoder(union)

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Any:
        assert self._socket.poll(int(DEADLINE_S * 1000)), "no message in time"
        return self._decoder.decode(self._socket.recv())

    def has_message(self, within_s: float) -> bool:
        return bool(self._socket.poll(int(within_s * 1000)))

    def close(self) -> None:
        self._socket.close(0)


class Engine:
    """A core process with its workers, frontends and supervisor."""

    def __init__(self, directory: Path, config: EngineConfig = CONFIG):
        self._context = zmq.Context()
        self._peers: list[Peer] = []
        self._directory = directory
        self._status = self._context.socket(zmq.PULL)
        self._status.bind(self._endpoint("supervisor"))
        self.supervisor = self._keep(Peer(self._status, ToSupervisor))
        names = ("frontends", "workers", "supervisor")
        launch = CoreLaunch(config, CHECKPOINT, *map(self._endpoint, names), hash_seed=7)
        self.process: subprocess.Popen[bytes] = spawn("engine_core.process", launch)
        self.workers = [self._connect("workers", ToWorker, bytes([rank, 0, 0, 0])) for rank in range(RANKS)]
        self._simulation: SimulatedWorker | None = None

    @contextlib.contextmanager
    def without_supervisor(self) -> Iterator[None]:
        """No connection to the supervisor is made meanwhile; to be called before there is one."""
        self._status.unbind(self._endpoint("supervisor"))
        yield
        self._status.bind(self._endpoint("supervisor"))

    def frontend(self, number: int) -> Peer:
        peer = self._connect("frontends", FromCore)
        peer.send(Hello(number))
        return peer

    def load(self) -> list[AllocateKV]:
        for rank, worker in enumerate(self.workers):
            worker.send(Loaded(rank, [SPEC], 10_000, 1000 + rank))
        return [worker.receive() for worker in self.workers]

    def start(self) -> dict[str, int | str]:
        """Bring the workers up; returns the figures of the banner."""
        allocate = self.load()[0]
        self._simulation = SimulatedWorker([SPEC], allocate.num_blocks, VOCABULARY, (4, 16), known_ids)
        for rank, worker in enumerate(self.workers):
            worker.send(WorkerReady(rank))
        ready = self.report()
        assert isinstance(ready, Ready) and ready.process == "core"
        return ready.detail

    def report(self) -> Ready | Dead:
        """The core's next message to the supervisor that is no heartbeat."""
        while isinstance(message := self.supervisor.receive(), Heartbeat):
            pass
        assert isinstance(message, Ready | Dead)
        return message

    def work_until(self, done: Callable[[], bool]) -> None:
        """Execute steps as they come; every rank must get the same ones."""
        assert self._simulation is not None
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, "not done in time"
            if self.workers[0].has_message(0.01):
                batches = [worker.receive() for worker in self.workers]
                assert isinstance(batches[0], ScheduledBatch) and batches[0] == batches[1]
                self.workers[0].send(self._simulation.execute(batches[0]))

    def work_until_quiet(self) -> int:
        """Execute what still comes; returns how many steps that were."""
        assert self._simulation is not None
        steps = 0
        while self.workers[0].has_message(0.5):
            batches = [worker.receive() for worker in self.workers]
            self.workers[0].send(self._simulation.execute(batches[0]))
            steps += 1
        return steps

    def exit_status(self) -> int:
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        for peer in self._peers:
            peer.close()
        self._context.term()

    def _connect(self, name: str, union: Any, identity: bytes = b"") -> Peer:
        socket = self._context.socket(zmq.DEALER)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self._endpoint(name))
        return self._keep(Peer(socket, union))

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _keep(self, peer: Peer) -> Peer:
        self._peers.append(peer)
        return peer


PROMPTS: list[list[int]] = []


def known_ids(new: NewRow, ids: list[int]) -> list[int]:
    """The prompt of a new row that computes `ids` first."""
    computed = slice(new.computed, new.computed + len(ids))
    return next(one for one in PROMPTS if len(one) == new.num_known and one[computed] == ids)


def request(number: int, prompt: list[int], max_tokens: int) -> AddRequest:
    PROMPTS.append(prompt)
    return AddRequest([number], pack_ids(prompt), max_tokens, GREEDY)


def collect(frontend: Peer, tokens: dict[int, list[int]], reasons: dict[int, FinishReason]) -> None:
    """Receive all pending deltas."""
    while frontend.has_message(0):
        deltas = frontend.receive()
        assert isinstance(deltas, TokenDeltas)
        for request_id, token_id in zip(deltas.request_ids, unpack_ids(deltas.token_ids), strict=True):
            tokens.setdefault(request_id, []).append(token_id)
        reasons.update({finished.request_id: finished.reason for finished in deltas.finished})
