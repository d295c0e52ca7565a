"""`python -m engine_core.process`: an engine core with its sockets. Started by atom-launch.

    frontends   ROUTER  in:  Hello, AddRequest, Abort, GetStats, Profile
                        out: CoreReady, TokenDeltas, CoreStats, CoreDead, ProfileResult
    workers     ROUTER  in:  Loaded, WorkerReady, BatchResult, WorkerFailed, RankTrace
                        out: AllocateKV, ScheduledBatch, Shutdown, Profile
    supervisor  PUSH    out: Ready, Dead

One thread, one loop: wait for either side, take in what came, hand out steps, answer.
"""

import contextlib
import gc
import secrets
import signal
import sys
import time
import traceback
from types import FrameType
from typing import TypeVar

import zmq

from atom.messages.codec import encode
from atom.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    GetStats,
    Hello,
    ToCore,
    TokenDeltas,
)
from atom.messages.launch import CoreLaunch
from atom.messages.profile import Profile, ProfileResult, RankTrace
from atom.messages.supervisor import Dead, Ready, ToSupervisor
from atom.messages.worker import (
    AllocateKV,
    BatchResult,
    FromWorker,
    Loaded,
    Shutdown,
    WorkerFailed,
    WorkerReady,
)
from atom.utils import envs
from atom.utils.errors import one_line
from atom.utils.exit_status import ExitStatus
from atom.utils.install_check import check_install
from atom.utils.logger import get_logger, setup_logging
from atom.utils.process import read_launch
from atom.utils.step_trace import StepTrace
from engine_core.core import EngineCore
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.links import FrontendLink, LinkError, WorkerLink
from engine_core.profiling import LONGEST_S, Outcome, Profiling
from engine_core.startup import CachePlan, StartupError, limits_of, plan_cache

StartMessage = TypeVar("StartMessage", Loaded, WorkerReady)

_NAME = "core"
_POLL_MS = 250  # also how long SIGTERM may wait while nothing happens
_LOAD_DEADLINE_S = 3600.0
_WARM_UP_DEADLINE_S = 1800.0
_STEP_DEADLINE_S = 600.0
_LINGER_MS = 2000
_HELLO_MS = 500  # a frontend that started with the core tries every 100 ms to reach it


class CoreFailure(RuntimeError):
    """The engine cannot go on; one line."""


class CoreProcess:
    """An engine core, its frontends and its workers."""

    def __init__(self, launch: CoreLaunch):
        self.stopping = False
        """Set by a signal: leave the loop."""
        self._launch = launch
        self._num_ranks = launch.config.parallel.tensor_parallel_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers = WorkerLink(self._context, launch.workers, self._num_ranks)
        self._frontends = FrontendLink(self._context, launch.frontends)
        self._supervisor = self._context.socket(zmq.PUSH)
        self._supervisor.connect(launch.supervisor)
        self._poller = zmq.Poller()
        self._poller.register(self._workers.socket, zmq.POLLIN)
        self._trace = StepTrace(launch.config.observability.step_trace, _NAME)
        traced = launch.config.observability.torch_profiler_dir is not None
        self._profiling = Profiling(self._num_ranks, traced)
        self._connected: dict[bytes, int] = {}  # identity of each frontend that said Hello, and its number
        self._dropped: set[bytes] = set()  # frontends that lost tokens; a Hello starts anew
        self._checked_at_step = 0

    def run(self) -> int:
        """Serve until a signal or a failure; returns the exit status."""
        try:
            started = self._start()
            if started is not None:
                self._serve(*started)
            self._shut_workers_down()
            return 0
        except Exception as error:  # whatever it is, frontends and supervisor must hear of it
            if envs.ATOM_LOG_MORE:
                traceback.print_exc()
            lacking = isinstance(error, StartupError)
            reason = one_line(error, CoreFailure, StartupError, LinkError)
            self._die(reason, ExitStatus.RESOURCES if lacking else ExitStatus.FAILURE)
            return 1
        finally:
            self._trace.close()
            self._context.destroy(linger=_LINGER_MS)

    # Start

    def _start(self) -> tuple[EngineCore, CoreReady] | None:
        """Bring the workers up; None when a signal came first."""
        config = self._launch.config
        limits = limits_of(config)
        loaded = self._gather(Loaded, _LOAD_DEADLINE_S, "to load the model")
        if loaded is None:
            return None
        plan = plan_cache(config, self._launch.checkpoint.max_model_len, loaded)
        kv = KVCacheManager(
            plan.specs,
            plan.num_blocks,
            limits.max_num_batched_tokens,
            secrets.randbits(64),
            config.cache.enable_prefix_caching,
        )
        core = EngineCore(limits, kv, plan.max_model_len)
        self._workers.send(AllocateKV(plan.num_blocks, plan.max_model_len))
        if self._gather(WorkerReady, _WARM_UP_DEADLINE_S, "to warm up") is None:
            return None
        self._announce(plan)
        return core, CoreReady(plan.max_model_len, plan.kv_tokens, [one.weight_bytes for one in loaded])

    def _gather(self, kind: type[StartMessage], deadline_s: float, doing: str) -> list[StartMessage] | None:
        """One message of a kind from every rank, by rank; None when a signal came first."""
        got: dict[int, StartMessage] = {}
        deadline = time.monotonic() + deadline_s
        while len(got) < self._num_ranks:
            if self.stopping:
                return None
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in got)
                raise CoreFailure(f"waited {deadline_s:.0f} s for worker {missing} {doing}")
            self._poller.poll(_POLL_MS)
            for message in self._workers.receive():
                if not isinstance(message, kind):
                    raise _unexpected(message)
                got[message.rank] = message
        return [got[rank] for rank in sorted(got)]

    def _announce(self, plan: CachePlan) -> None:
        asked = self._launch.checkpoint.max_model_len
        if self._launch.config.model.max_model_len is None and plan.max_model_len < asked:
            get_logger().info(
                "requests may have %d tokens instead of %d: the KV cache holds no more",
                plan.max_model_len,
                asked,
            )
        detail: dict[str, int | str] = {
            "kv_tokens": plan.kv_tokens,
            "max_model_len": plan.max_model_len,
            "num_blocks": " + ".join(map(str, plan.num_blocks)),
        }
        self._report(Ready(_NAME, detail))
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process: no need to look at it again

    # Work

    def _serve(self, core: EngineCore, ready: CoreReady) -> None:
        """Until a signal. Frontends are heard from here on; what they sent before has waited."""
        self._poller.register(self._frontends.socket, zmq.POLLIN)
        while not self.stopping:
            if not self._poller.poll(_POLL_MS):
                self._while_quiet(core)
            answers = [self._take_in(core, message) for message in self._workers.receive()]
            for identity, message in self._frontends.receive():
                self._hear(core, ready, identity, message)
            while (batch := core.schedule()) is not None:
                self._workers.send(batch)
                self._trace.mark("sent", batch.step)
            for deltas in answers:
                for identity, delta in deltas.items():
                    self._answer(core, identity, delta)
            if self._profiling.is_timed:
                self._conclude(core, self._profiling.overdue())

    def _take_in(self, core: EngineCore, message: FromWorker) -> dict[bytes, TokenDeltas]:
        if isinstance(message, RankTrace):
            self._conclude(core, self._profiling.take(message))
            return {}
        if not isinstance(message, BatchResult):
            raise _unexpected(message)
        self._trace.mark("result", message.step)
        return core.update(message)

    def _hear(self, core: EngineCore, ready: CoreReady, identity: bytes, message: ToCore) -> None:
        if identity in self._dropped and not isinstance(message, Hello):
            self._frontends.send(identity, CoreDead("this frontend did not read its tokens in time"))
            return
        match message:
            case Hello(number):
                self._welcome(core, identity, number)
                self._answer(core, identity, ready)
            case AddRequest():
                refusal = core.add(message, identity)
                if refusal is not None:
                    self._answer(core, identity, refusal)
            case Abort(request_ids):
                core.abort(request_ids)
            case GetStats():
                self._answer(core, identity, core.stats())
            case Profile():
                out_of_turn = self._profiling.ask(message, identity)
                if out_of_turn is None:
                    self._workers.send(message)
                else:
                    self._answer(core, identity, out_of_turn)

    def _conclude(self, core: EngineCore, outcome: Outcome | None) -> None:
        """Profiling is on or off on all ranks, or one of them could not, or it has lasted too long."""
        if outcome is None:
            return
        if outcome.stop:
            reason = outcome.answer.error or f"it was on for {LONGEST_S:.0f} s"
            get_logger().warning("profiling is turned off: %s", reason)
            self._workers.send(Profile(False))
        if outcome.frontend is not None:
            self._answer(core, outcome.frontend, outcome.answer)
        elif outcome.answer.error:
            get_logger().warning("a profile that nobody waits for: %s", outcome.answer.error)

    def _welcome(self, core: EngineCore, identity: bytes, number: int) -> None:
        """A frontend that comes back under a new identity has forgotten its old requests."""
        for known, its_number in list(self._connected.items()):
            if its_number == number and known != identity:
                self._forget(core, known)
        self._connected[identity] = number
        self._dropped.discard(identity)

    def _answer(
        self,
        core: EngineCore,
        identity: bytes,
        message: TokenDeltas | CoreReady | CoreStats | ProfileResult,
    ) -> None:
        """Send, or give the frontend up: a token is never lost while its request goes on."""
        if not self._frontends.send(identity, message):
            number = self._connected.get(identity, -1)
            self._forget(core, identity)
            self._dropped.add(identity)
            get_logger().warning("frontend %d is gone or does not read: its requests are aborted", number)

    def _forget(self, core: EngineCore, identity: bytes) -> None:
        core.abort_frontend(identity)
        self._connected.pop(identity, None)

    def _while_quiet(self, core: EngineCore) -> None:
        """Nothing came for a while: make sure that the workers live, or check the books when idle."""
        sent_at = core.oldest_sent_at
        if sent_at is not None:
            if time.monotonic() - sent_at > _STEP_DEADLINE_S:
                raise CoreFailure(f"the workers have not answered a step for {_STEP_DEADLINE_S:.0f} s")
            return
        steps = core.stats().steps
        if steps != self._checked_at_step:
            self._checked_at_step = steps
            core.check_integrity()

    # End

    def _shut_workers_down(self) -> None:
        """Ranks that never came need no farewell."""
        with contextlib.suppress(LinkError):
            self._workers.send(Shutdown())

    def _die(self, reason: str, status: ExitStatus) -> None:
        """Tell everybody: frontends, also those that nobody has listened to yet, and the supervisor."""
        get_logger().error("the engine core ends: %s", reason)
        if not self._connected:
            self._frontends.socket.poll(_HELLO_MS)
        for identity, message in self._frontends.receive():
            if isinstance(message, Hello):
                self._connected[identity] = message.frontend
        for identity in self._connected:
            self._frontends.send(identity, CoreDead(reason))
        self._report(Dead(_NAME, reason, status))
        self._shut_workers_down()

    def _report(self, message: ToSupervisor) -> None:
        self._supervisor.send(encode(message), zmq.DONTWAIT)


def _unexpected(message: FromWorker) -> CoreFailure:
    if isinstance(message, WorkerFailed):
        return CoreFailure(f"worker {message.rank}: {message.reason}")
    return CoreFailure(f"a worker sent {type(message).__name__} out of turn")


def main() -> None:
    """Exit status 0 after SIGTERM, 1 after a failure that was reported."""
    check_install()
    launch = read_launch(CoreLaunch)
    setup_logging(_NAME)
    process = CoreProcess(launch)

    def stop(signum: int, frame: FrameType | None) -> None:
        process.stopping = True

    signal.signal(signal.SIGTERM, stop)
    sys.exit(process.run())


if __name__ == "__main__":
    main()
