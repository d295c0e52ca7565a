"""`python -m engine_core.process`: an engine core with its sockets. Started by atom-launch.

    frontends   ROUTER  in:  Hello, AddRequest, Abort, Claim, GetStats, Profile, SetLogLevel, GrammarBytes,
                             questions; TakeStreams of the supervisor
                        out: CoreReady, CoreStalled, TokenDeltas, CoreStats, CoreDead, ProfileResult,
                             GetGrammar, Claimed, answers
    workers     ROUTER  in:  Loaded, WorkerReady, BatchResult, WorkerFailed, WorkerHeartbeat, RankTrace,
                             GrammarLoaded, BlocksCopied, BlocksFound, LeasesReleased
                        out: AllocateKV, ScheduledBatch, StepsDone, Shutdown, Profile, SetLogLevel,
                             LoadGrammar, DropGrammar, CopyBlocks, FindBlocks, ReleaseLease, EndLeases
    supervisor  PUSH    out: Ready, Dead, Heartbeat

One thread runs one loop: wait for messages, process them, schedule steps, send the results.
"""

import contextlib
import gc
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TypeVar

import zmq

from atom.shared.config.kv_events import kv_events_config
from atom.shared.config.kv_peers import prompt_transfer
from atom.shared.config.kv_transfer import kv_role, reads_peers
from atom.shared.messages.admin import AbortNamed, Done, GetRequests, ResetPrefixCache, SetLogLevel
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import (
    Abort,
    AddRequest,
    CoreReady,
    CoreStalled,
    GetStats,
    Hello,
    ToCore,
    TokenDeltas,
)
from atom.shared.messages.grammar import GrammarBytes, GrammarLoaded
from atom.shared.messages.kv_peers import LeasesReleased
from atom.shared.messages.kv_tiers import PEER, BlocksCopied, BlocksFound, TierSlots
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.profile import Profile, RankTrace
from atom.shared.messages.resume import Claim, TakeStreams
from atom.shared.messages.supervisor import LAST_REPORT_MS, Dead, Heartbeat, Ready, ToSupervisor
from atom.shared.messages.worker import (
    AllocateKV,
    BatchResult,
    ExpertLoad,
    FromWorker,
    Loaded,
    Shutdown,
    StepsDone,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerReady,
)
from atom.shared.utils import envs
from atom.shared.utils.errors import one_line, out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.install_check import check_install
from atom.shared.utils.lease_seal import new_secret
from atom.shared.utils.liveness import (
    WARNINGS_PER_TIMEOUT,
    HeartbeatSender,
    PeerMonitor,
    SilenceTimer,
    heartbeat_interval,
    worker_monitor,
)
from atom.shared.utils.logger import describe, get_logger, set_log_level, setup_logging
from atom.shared.utils.own_directory import NotOwnError
from atom.shared.utils.process import read_launch
from atom.shared.utils.redis_client import RedisClient, RedisError, agreed_seed
from atom.shared.utils.stack_dump import add_note, dump_stacks_on_signal
from atom.shared.utils.step_trace import StepTrace
from engine_core.commands import responses
from engine_core.core import EngineCore
from engine_core.flight_recorder import FlightRecorder
from engine_core.frontends import Frontends
from engine_core.hang_note import describe_work
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.kv_event_publisher import KVEventPublisher, PublishError
from engine_core.kv_cache.kv_events import Cleared
from engine_core.kv_tiers.file_space import LEAST_UNIT, space_unit
from engine_core.kv_tiers.tier_seed import SEED_FILE, stored_seed
from engine_core.links import LinkError, WorkerLink
from engine_core.profiling import MAX_RECORDING_S, Outcome, Profiling
from engine_core.startup import CachePlan, StartupError, image_registry, limits_of, plan_cache

StartMessage = TypeVar("StartMessage", Loaded, WorkerReady)

_TRACE = "core"
_POLL_MS = 250  # also how long SIGTERM may wait while nothing happens
_HELD_POLL_MS = 10
_LOAD_DEADLINE_S = 3600.0
_WARM_UP_DEADLINE_S = 1800.0
_MAX_GAP_S = 1.0  # of the step timer: while the core itself is stopped, no step takes longer
_LINGER_MS = 2000  # for workers and frontends, which may have ended


class CoreFailure(RuntimeError):
    """The engine must end; the text is one line."""


class CoreHang(CoreFailure):
    """A worker, or a step, hangs."""


class CoreProcess:
    """An engine core, its frontends and its workers."""

    def __init__(self, launch: CoreLaunch):
        self.stopping = False
        """Set by a signal: leave the loop."""
        self._launch = launch
        self._name = launch.label
        self._num_ranks = launch.config.parallel.tensor_parallel_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers = WorkerLink(self._context, launch.workers, self._num_ranks)
        self._frontends = Frontends(self._context, launch.frontends)
        self._supervisor = self._context.socket(zmq.PUSH)
        self._supervisor.connect(launch.supervisor)
        timeouts = launch.config.reliability
        interval = heartbeat_interval(timeouts.hang_timeout)
        self._heartbeats = HeartbeatSender(
            self._context, zmq.PUSH, launch.supervisor, lambda: Heartbeat(self._name), interval
        )
        collective = launch.config.parallel.workers_in_mesh > 1
        self._worker_monitor = worker_monitor(timeouts.hang_timeout, collective)
        self._step_timer = SilenceTimer(_MAX_GAP_S)
        self._step_timeout_s = timeouts.step_timeout
        self._step_done = False
        self._late_step = ""
        self._poller = zmq.Poller()
        self._poller.register(self._workers.socket, zmq.POLLIN)
        self._trace = StepTrace(launch.config.observability.step_trace, _TRACE)
        traced = launch.config.observability.torch_profiler_dir is not None
        self._profiling = Profiling(self._num_ranks, traced)
        self._checked_at_step = 0
        self._lockstep = launch.config.parallel.lockstep
        self._steps_sent = False  # since the last StepsDone
        self._claims: list[tuple[bytes, Claim]] = []
        self._kv_events: KVEventPublisher | None = None
        self._core: EngineCore | None = None
        self._recorder = FlightRecorder(launch)

    def run(self) -> int:
        """Serve until a signal or a failure; returns the exit status."""
        try:
            self._kv_events = self._publisher()
            started = self._start()
            if started is not None:
                self._serve(*started)
            self._shut_workers_down()
            return 0
        except Exception as error:  # of any kind: frontends and supervisor need the cause
            if envs.ATOM_LOG_MORE:
                traceback.print_exc()
            # A worker reports its own lack of memory.
            memory = "" if isinstance(error, CoreFailure) else out_of_memory(error)
            lacks_resources = isinstance(error, StartupError | PublishError) or memory
            status = ExitStatus.RESOURCES if lacks_resources else ExitStatus.FAILURE
            reason = memory or one_line(error, CoreFailure, StartupError, PublishError, LinkError)
            self._report_failure(reason, status, isinstance(error, CoreHang))
            return 1
        finally:
            if self._kv_events is not None:
                self._kv_events.close()
            self._trace.close()
            self._supervisor.close(LAST_REPORT_MS)
            self._context.destroy(linger=_LINGER_MS)

    # Start

    def _publisher(self) -> KVEventPublisher | None:
        """The publisher of KV events, if there is one. Subscribers can connect from now on."""
        config = self._launch.config
        rank = self._launch.data_parallel_rank
        events = kv_events_config(config.cache, config.parallel.data_parallel_size)
        if events is None:
            return None
        return KVEventPublisher(events.of_rank(rank), rank, config.block_tokens)

    def _start(self) -> tuple[EngineCore, CoreReady] | None:
        """Wait for the workers to load and warm up. Returns None when a signal came first."""
        config = self._launch.config
        loaded = self._collect(Loaded, _LOAD_DEADLINE_S, "to load the model")
        if loaded is None:
            return None
        limits = limits_of(config, loaded)
        if limits.max_num_mixed_tokens:
            describe(
                "a step in which requests generate has at most %d tokens, prompts included "
                "(--max-num-mixed-tokens)",
                limits.max_num_mixed_tokens,
            )
        seed, disk_unit = self._seed_of_directory()
        model_max_len = self._launch.checkpoint.max_model_len
        plan = plan_cache(config, model_max_len, loaded, self._launch.num_blocks, disk_unit)
        if self._reads_leases():
            plan.tiers.append(TierSlots(PEER, []))
        seed = self._agreed_seed(seed)
        kv = KVCacheManager(
            plan.specs,
            plan.num_blocks,
            limits.max_chunk,
            seed,
            config.cache.enable_prefix_caching,
            lists_events=self._kv_events is not None,
            state_interval=config.cache.state_checkpoint_interval_tokens,
        )
        if plan.tiers:
            least = config.cache.kv_offload_min_tokens
            role = "kv_both" if reads_peers(config.cache) else kv_role(config.cache)
            kv.offload_to(plan.tiers, least, self._num_ranks, config.shares_blocks, role)
        address = self._lease_address()
        secret = new_secret()
        if address:
            kv.lease_to(address, self._num_ranks, secret)
        grace_s = config.reliability.orphan_grace
        max_queue_s = config.scheduler.max_queue_time
        images = image_registry(loaded, self._launch.checkpoint.images)
        core = EngineCore(
            limits,
            kv,
            plan.max_model_len,
            orphan_grace_s=grace_s,
            max_queue_s=max_queue_s,
            images=images,
        )
        self._workers.send(AllocateKV(plan.num_blocks, plan.max_model_len, plan.tiers, seed, address, secret))
        ready = self._collect(WorkerReady, _WARM_UP_DEADLINE_S, "to warm up")
        if ready is None:
            return None
        if kv.offload is not None and (count := kv.offload.adopt([worker.stored for worker in ready])):
            get_logger().info("%d KV blocks of earlier starts are in --kv-offload-dir", count)
        self._report_ready(plan)
        return core, CoreReady(plan.max_model_len, plan.kv_tokens, [one.weight_bytes for one in loaded])

    def _lease_address(self) -> str:
        """Where other engines ask this one's workers for its blocks; empty if none reads them.

        Those of this server next to the socket of the workers, so that it is another one in each life.
        """
        config = self._launch.config
        rank = self._launch.data_parallel_rank
        transfer = prompt_transfer(config.cache, config.parallel)
        if transfer.gives:
            return f"tcp://{transfer.host}:{transfer.port + rank * self._num_ranks}"
        is_read = rank < config.parallel.prefill_engines
        return f"{self._launch.workers}-kv" if is_read and reads_peers(config.cache) else ""

    def _reads_leases(self) -> bool:
        """Whether this engine reads blocks of other engines, of this server or others."""
        config = self._launch.config
        if config.parallel.prefill_engines:
            is_reader = self._launch.data_parallel_rank >= config.parallel.prefill_engines
            return is_reader and reads_peers(config.cache)
        return prompt_transfer(config.cache, config.parallel).takes

    def _seed_of_directory(self) -> tuple[int, int]:
        """The hash seed of the directory that has blocks of earlier starts, and the unit of its files' space.

        Without a directory, the seed of the launch.
        """
        if self._launch.config.cache.kv_offload_dir is None:
            return self._launch.hash_seed, LEAST_UNIT
        directory = Path(self._launch.config.cache.kv_offload_dir)
        try:
            return stored_seed(directory), space_unit(directory / SEED_FILE)
        except (OSError, NotOwnError) as error:
            raise StartupError(f"--kv-offload-dir: {one_line(error, OSError, NotOwnError)}") from None

    def _agreed_seed(self, seed: int) -> int:
        """The hash seed of the remote tier, which takes over `seed` if it has none."""
        cache = self._launch.config.cache
        if cache.kv_offload_remote_url is None:
            return seed
        try:
            with contextlib.closing(RedisClient(cache.kv_offload_remote_url)) as client:
                return agreed_seed(client, seed)
        except RedisError as error:
            get_logger().warning(
                "--kv-offload-remote-url: %s; this engine goes on without, and finds no blocks of servers "
                "that have reached it before",
                one_line(error, RedisError),
            )
            return seed

    def _collect(self, kind: type[StartMessage], deadline_s: float, doing: str) -> list[StartMessage] | None:
        """Wait for a message of type `kind` from every rank; returns them by rank, or None after a signal."""
        received: dict[int, StartMessage] = {}
        deadline = time.monotonic() + deadline_s
        # Longer than the hang timeout: loading a library or code for a device may hold the worker's GIL.
        monitor = PeerMonitor(self._step_timeout_s)
        while len(received) < self._num_ranks:
            if self.stopping:
                return None
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in received)
                raise CoreFailure(f"waited {deadline_s:.0f} s for worker {missing} {doing}")
            self._poller.poll(_POLL_MS)
            self._heartbeats.send_if_due()
            for message in self._workers.receive():
                if isinstance(message, WorkerHeartbeat):
                    monitor.seen(_worker(message.rank))
                elif isinstance(message, kind):
                    received[message.rank] = message
                else:
                    raise _unexpected(message)
            monitor.update()
            if reason := monitor.hung():
                raise CoreHang(reason)
        return [received[rank] for rank in sorted(received)]

    def _report_ready(self, plan: CachePlan) -> None:
        trained = self._launch.checkpoint.max_model_len
        if self._launch.config.model.max_model_len is None and plan.max_model_len < trained:
            get_logger().warning(
                "max_model_len is %d instead of %d: the KV cache holds no more tokens",
                plan.max_model_len,
                trained,
            )
        detail: dict[str, int | str] = {
            "kv_tokens": plan.kv_tokens,
            "max_model_len": plan.max_model_len,
            "num_blocks": " + ".join(map(str, plan.num_blocks)),
        }
        self._send_to_supervisor(Ready(self._name, detail, plan.num_blocks))
        gc.collect()
        gc.freeze()  # exclude what lives as long as the process from garbage collection

    # Work

    def _serve(self, core: EngineCore, ready: CoreReady) -> None:
        """Run the engine until a signal. Frontends' messages are received only from here on."""
        self._poller.register(self._frontends.socket, zmq.POLLIN)
        self._core = core
        self._mark_workers_seen()
        if self._kv_events is not None and self._launch.num_blocks:
            self._kv_events.put([Cleared()])  # subscribers know the blocks from before a restart
        while not self.stopping:
            self._wait(core)
            results = self._receive(core, ready)
            self._send_due(core)
            self._send_steps(core)
            # After the next step, which the device waits for.
            self._send_results(core, [*results, core.end_stored()])
            self._give_claimed(core)
            if self._kv_events is not None and (events := core.take_kv_events()):
                self._kv_events.put(events)
            if self._profiling.is_timed:
                self._finish_profile(core, self._profiling.overdue())
            self._heartbeats.send_if_due()
            self._check_workers(core, ready)

    def _wait(self, core: EngineCore) -> None:
        """Wait for a message, unless there is work; an idle core is checked meanwhile."""
        wait_ms = _HELD_POLL_MS if core.has_held else _POLL_MS
        if not self._poller.poll(0 if core.has_deferred_work else wait_ms):
            self._check_integrity(core)

    def _receive(self, core: EngineCore, ready: CoreReady) -> list[dict[bytes, TokenDeltas]]:
        """Process the messages that have come; returns the results of steps for each frontend."""
        results = [self._process_worker_message(core, message) for message in self._workers.receive()]
        for identity, message in self._frontends.receive():
            self._process_frontend_message(core, ready, identity, message)
        return results

    def _send_due(self, core: EngineCore) -> None:
        """Send what messages and the time ask for: grammars, ends of requests, offers of streams."""
        for grammar_message in core.grammar_messages():
            self._workers.send(grammar_message)
        while questions := core.grammar_questions():  # a frontend that is gone leaves them to others
            for identity, question in questions:
                self._frontends.send(core, identity, question)
        core.end_expired()
        core.end_leases()
        self._send_results(core, [core.end_overdue()])
        for identity in self._frontends.connected[:1]:
            for offer in core.offers(identity):
                self._frontends.send(core, identity, offer)

    def _send_steps(self, core: EngineCore) -> None:
        """Schedule all steps that can begin, and send them with the copies of KV blocks."""
        while (batch := core.schedule()) is not None:
            for image_message in core.image_messages():
                self._workers.send(image_message)
            self._end_leases(core)
            self._recorder.sent(self._workers.send(batch))
            self._trace.mark("sent", batch.step)
            self._steps_sent = True
        self._end_leases(core)
        for copies in core.tier_messages():
            self._workers.send(copies)
        # Workers that wait for a batch of this engine delay the other engines: none will come for now.
        if self._lockstep and self._steps_sent and not core.num_in_flight:
            self._workers.send(StepsDone())
            self._steps_sent = False

    def _end_leases(self, core: EngineCore) -> None:
        for ended in core.lease_messages():
            self._workers.send(ended)

    def _send_results(self, core: EngineCore, results: list[dict[bytes, TokenDeltas]]) -> None:
        for result in results:
            for identity, deltas in result.items():
                self._frontends.send(core, identity, deltas)

    def _give_claimed(self, core: EngineCore) -> None:
        """Give streams to the frontends that have claimed them.

        After the results: they were made for the earlier frontend, and what is claimed has their tokens.
        """
        claims = self._claims
        self._claims = []
        for identity, message in claims:
            for to, part in core.claim(message, identity):
                self._frontends.send(core, to, part)

    def _process_worker_message(self, core: EngineCore, message: FromWorker) -> dict[bytes, TokenDeltas]:
        """Returns the deltas for each frontend. Raises CoreFailure for a message that ends the engine."""
        match message:
            case BatchResult():
                self._trace.mark("result", message.step)
                self._step_done = True
                return core.update_from_output(message)
            case WorkerHeartbeat():
                self._worker_monitor.seen(_worker(message.rank))
                core.worker_heaps[message.rank] = message.heap
            case RankTrace():
                self._finish_profile(core, self._profiling.add_trace(message))
            case ExpertLoad():
                core.expert_load = message
            case GrammarLoaded():
                return core.grammar_loaded(message)
            case BlocksCopied() | BlocksFound():
                core.blocks_copied(message)
            case LeasesReleased():
                core.end_leases(message)
            case _:
                raise _unexpected(message)
        return {}

    def _process_frontend_message(
        self, core: EngineCore, ready: CoreReady, identity: bytes, message: ToCore
    ) -> None:
        match message:
            case Hello(number):
                self._frontends.register(core, identity, number)
                self._frontends.send(core, identity, self._status(ready))
            case AddRequest():
                refusal = core.add(message, identity)
                if refusal is not None:
                    self._frontends.send(core, identity, refusal)
            case Abort():
                core.abort_own(message, identity)
            case Claim():
                self._claims.append((identity, message))
            case TakeStreams(question):
                found, left = core.take_streams()
                for each in found:
                    self._frontends.send(core, identity, each)
                self._frontends.send(core, identity, Done(question, left))
            case GrammarBytes():
                for to, deltas in core.grammar_provided(message).items():
                    self._frontends.send(core, to, deltas)
            case GetStats():
                self._frontends.send(core, identity, core.stats())
            case SetLogLevel(level):
                set_log_level(level)
                self._workers.send(message)
            case GetRequests() | AbortNamed() | ResetPrefixCache():
                for to, response in responses(core, identity, message):
                    self._frontends.send(core, to, response)
            case Profile():
                result = self._profiling.request(message, identity)
                if result is None:
                    self._workers.send(message)
                else:
                    self._frontends.send(core, identity, result)

    def _finish_profile(self, core: EngineCore, outcome: Outcome | None) -> None:
        """Send the result of a profile request; stop a recording that failed or lasted too long."""
        if outcome is None:
            return
        if outcome.stop:
            reason = outcome.result.error or f"it was on for {MAX_RECORDING_S:.0f} s"
            get_logger().warning("profiling is stopped: %s", reason)
            self._workers.send(Profile(False))
        if outcome.frontend is not None:
            self._frontends.send(core, outcome.frontend, outcome.result)
        elif outcome.result.error:
            get_logger().warning("profiling failed: %s", outcome.result.error)

    def _check_workers(self, core: EngineCore, ready: CoreReady) -> None:
        """Raises CoreFailure for a hung worker or step; notifies frontends of silent workers, late steps."""
        changed = self._check_step(core)
        if self._profiling.is_writing:
            self._mark_workers_seen()
        if self._worker_monitor.update() or changed:
            for identity in self._frontends.connected:
                self._frontends.send(core, identity, self._status(ready))
        if reason := self._worker_monitor.hung():
            raise CoreHang(reason)

    def _check_step(self, core: EngineCore) -> bool:
        """Whether a step has become late, or the late one is done. Raises CoreHang for a hung one."""
        seen = self._step_done or not core.num_in_flight
        self._step_done = False
        silence = self._step_timer.update(seen)
        if silence > self._step_timeout_s:
            raise CoreHang(f"the workers have not finished a step for {self._step_timeout_s:.0f} s")
        was_late = bool(self._late_step)
        if was_late and seen:
            self._late_step = ""
            get_logger().warning("the step that was late is done")
        elif not was_late and silence > self._step_timeout_s / WARNINGS_PER_TIMEOUT:
            self._late_step = f"a step has run for {silence:.0f} s"
            get_logger().warning(
                "%s: the engine is unready; at --step-timeout (%.0f s) it counts as hung",
                self._late_step,
                self._step_timeout_s,
            )
        return was_late != bool(self._late_step)

    def _mark_workers_seen(self) -> None:
        for rank in range(self._num_ranks):
            self._worker_monitor.seen(_worker(rank))

    def _status(self, ready: CoreReady) -> CoreReady | CoreStalled:
        reason = self._worker_monitor.unresponsive or self._late_step
        return CoreStalled(reason) if reason else ready

    def _check_integrity(self, core: EngineCore) -> None:
        """Check the integrity of an idle core slice by slice, once after its last step."""
        if core.num_in_flight or core.has_deferred_work:
            return
        steps = core.stats().steps
        if steps != self._checked_at_step and core.check_integrity_slice():
            self._checked_at_step = steps

    # End

    def _shut_workers_down(self) -> None:
        """Send Shutdown to all connected workers."""
        with contextlib.suppress(LinkError):
            self._workers.send(Shutdown())

    def _report_failure(self, reason: str, status: ExitStatus, is_hang: bool) -> None:
        """Send the cause to the supervisor and all frontends."""
        get_logger().error("the engine core ends: %s", reason)
        self._frontends.report_death(reason)
        self._send_to_supervisor(Dead(self._name, reason, status, is_hang))
        if self._core is not None:
            self._recorder.write(self._core, reason, is_hang)
        if not is_hang:
            self._shut_workers_down()
        elif self._core is not None:  # the supervisor asks the workers for their stacks before it kills them
            add_note(describe_work(self._core, self._recorder.last))

    def _send_to_supervisor(self, message: ToSupervisor) -> None:
        self._supervisor.send(encode(message), zmq.DONTWAIT)


def _worker(rank: int) -> str:
    return f"worker {rank}"


def _unexpected(message: FromWorker) -> CoreFailure:
    if isinstance(message, WorkerFailed):
        return CoreFailure(f"worker {message.rank}: {message.reason}")
    return CoreFailure(f"a worker sent {type(message).__name__} unexpectedly")


def main() -> None:
    """Exit status 0 after SIGTERM, 1 after a failure that was reported."""
    check_install()
    launch = read_launch(CoreLaunch)
    setup_logging(launch.label, launch.config.observability.log_level, launch.describes)
    dump_stacks_on_signal(launch.supervisor, launch.label)
    process = CoreProcess(launch)

    def stop(signum: int, frame: FrameType | None) -> None:
        process.stopping = True

    signal.signal(signal.SIGTERM, stop)
    sys.exit(process.run())


if __name__ == "__main__":
    main()
