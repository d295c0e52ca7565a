"""`python -m engine_core.process`: the engine core as a process. Started by atom-launch.

    start:  Loaded from every rank -> block counts -> AllocateKV -> WorkerReady from every rank
    loop:   requests in -> steps out, at most two in flight -> results in -> tokens out

It sleeps in one poll whenever there is nothing to send. A failure that is not a request's own
ends the process: workers, frontends and the supervisor are told why.
"""

import gc
import secrets
import signal
import socket
import sys
import time
import traceback

import zmq

from atom.messages.engine import Abort, AddRequest, CoreDead, CoreReady, FromCore, GetStats, Hello, ToCore
from atom.messages.launch import CoreLaunch
from atom.messages.supervisor import Dead, Ready
from atom.messages.worker import AllocateKV, BatchResult, FromWorker, KVSpec, Loaded, Shutdown
from atom.utils import envs
from atom.utils.logger import get_logger, setup_logging
from atom.utils.process import read_launch
from atom.utils.step_trace import StepTrace
from engine_core.core import EngineCore
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.kv_plan import cache_tokens, longest_sequence, plan_blocks
from engine_core.links import FrontendLink, SupervisorLink, WorkerLink
from engine_core.scheduler import Limits

_PROCESS = "core"
_IDLE_POLL_MS = 1000
# On a CPU a step of a large model may take minutes; this is for workers that never answer.
_STEP_DEADLINE_S = 1800.0


class CoreProcess:
    """Owns the sockets and the core between them."""

    def __init__(self, launch: CoreLaunch):
        self._launch = launch
        self._config = launch.config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers = WorkerLink(self._context, launch.workers, launch.config.parallel.tensor_parallel_size)
        self._frontends = FrontendLink(self._context, launch.frontends)
        self._supervisor = SupervisorLink(self._context, launch.supervisor)
        self._trace = StepTrace(launch.config.observability.step_trace, _PROCESS)
        self._known: set[bytes] = set()
        self._stopping = False
        self._checked = True

    def run(self) -> None:
        """Serve until SIGTERM. Raises what ends the engine, after everybody was told."""
        try:
            self._start()
            self._watch_sigterm()
            while not self._stopping:
                self._turn()
            self._workers.send(Shutdown())
        except Exception as error:
            self._tell_everybody(_one_line(error))
            raise
        finally:
            self._trace.close()
            self._context.destroy()

    def _start(self) -> None:
        loaded = self._workers.all_loaded()
        scheduler = self._config.scheduler
        budget, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        assert budget and rows, "the scheduler's limits are resolved before any process starts"
        specs = loaded[0].kv_specs
        num_blocks = self._block_counts(loaded, budget, rows)
        max_model_len = self._max_model_len(specs, num_blocks, budget)
        self._workers.send(AllocateKV(num_blocks, max_model_len))
        self._workers.all_ready()
        caching = self._config.cache.enable_prefix_caching
        kv = KVCacheManager(specs, num_blocks, budget, secrets.randbits(64), caching)
        limits = Limits(rows, budget, scheduler.scheduling_policy, scheduler.scheduler_delay_factor)
        self._core = EngineCore(limits, kv, max_model_len)
        weight_bytes = [each.weight_bytes for each in loaded]
        self._ready = CoreReady(max_model_len, cache_tokens(specs, num_blocks), weight_bytes)
        self._poller = zmq.Poller()
        for link in (self._workers, self._frontends):
            self._poller.register(link.socket, zmq.POLLIN)
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process
        detail: dict[str, int | str] = {
            "kv_tokens": self._ready.kv_tokens,
            "max_model_len": max_model_len,
            "num_blocks": sum(num_blocks),
        }
        self._supervisor.send(Ready(_PROCESS, detail))

    def _block_counts(self, loaded: list[Loaded], budget: int, rows: int) -> list[int]:
        """What the rank with the least room can hold, unless the user says how many."""
        if self._config.cache.num_kv_blocks is not None:
            return [self._config.cache.num_kv_blocks] * len(loaded[0].kv_specs)
        wanted = self._config.model.max_model_len or self._launch.checkpoint.max_model_len
        plans = [plan_blocks(each.kv_specs, each.kv_bytes, rows, budget, wanted) for each in loaded]
        counts = [min(group) for group in zip(*plans, strict=True)]
        if 0 in counts:
            smallest = min(each.kv_bytes for each in loaded)
            raise ValueError(
                f"{smallest / 2**20:.0f} MiB do not hold one KV block: raise "
                "--gpu-memory-utilization or --kv-cache-memory-bytes"
            )
        return counts

    def _max_model_len(self, specs: list[KVSpec], num_blocks: list[int], budget: int) -> int:
        """The user's wish, or as much of the checkpoint's length as the cache holds."""
        wish = self._config.model.max_model_len
        wanted = wish or self._launch.checkpoint.max_model_len
        longest = longest_sequence(specs, num_blocks, budget)
        if longest is None or longest >= wanted:
            return wanted
        if wish is not None:
            raise ValueError(
                f"the KV cache holds {longest} tokens, fewer than --max-model-len {wish}: lower it to "
                f"{longest}, or raise --kv-cache-memory-bytes or --gpu-memory-utilization"
            )
        get_logger().info("the KV cache holds %d tokens: no request may be longer", longest)
        return longest

    def _watch_sigterm(self) -> None:
        """From here on SIGTERM ends the loop; its byte in the pipe ends a poll."""
        self._signals, wake_up = socket.socketpair()
        for end in (self._signals, wake_up):
            end.setblocking(False)
        self._wake_up = wake_up
        self._poller.register(self._signals, zmq.POLLIN)
        signal.set_wakeup_fd(wake_up.fileno())
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _turn(self) -> None:
        """Send a step if one can run, else wait; then take in whatever has come."""
        batch = self._core.schedule()
        if batch is not None:
            self._workers.send(batch)
            self._trace.mark("sent", batch.step)
        if not self._poller.poll(0 if batch is not None else _IDLE_POLL_MS):
            if batch is None:
                self._look_around()
            return
        self._checked = False
        while (request := self._frontends.receive()) is not None:
            self._take_request(*request)
        while (result := self._workers.receive()) is not None:
            self._take_result(result)

    def _take_result(self, result: FromWorker) -> None:
        if not isinstance(result, BatchResult):
            raise RuntimeError(f"a worker sent {type(result).__name__} between steps")
        self._trace.mark("result", result.step)
        for frontend, deltas in self._core.update(result).items():
            self._send(frontend, deltas)

    def _look_around(self) -> None:
        """Nothing has happened for a while: are the workers stuck, or is it time to check the books?"""
        sent_at = self._core.oldest_sent_at
        if sent_at is not None and time.monotonic() - sent_at > _STEP_DEADLINE_S:
            raise RuntimeError(f"no result of a step from the workers for {_STEP_DEADLINE_S:.0f} s")
        if sent_at is None and not self._core.num_live and not self._checked:
            self._core.check_integrity()
            self._checked = True

    def _take_request(self, frontend: bytes, message: ToCore) -> None:
        match message:
            case AddRequest():
                refusal = self._core.add(message, frontend)
                if refusal is not None:
                    self._send(frontend, refusal)
            case Abort(request_ids):
                self._core.abort(request_ids)
            case Hello():
                self._known.add(frontend)
                self._send(frontend, self._ready)
            case GetStats():
                self._send(frontend, self._core.stats())

    def _send(self, frontend: bytes, message: FromCore) -> None:
        if not self._frontends.send(frontend, message):
            aborted = self._core.abort_frontend(frontend)
            self._known.discard(frontend)
            get_logger().warning("a frontend is gone; %d of its requests were aborted", aborted)

    def _tell_everybody(self, reason: str) -> None:
        for frontend in self._known:
            self._frontends.send(frontend, CoreDead(reason))
        self._supervisor.send(Dead(_PROCESS, reason))

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True


def main() -> None:
    """Exit status 0 after SIGTERM, 1 after a failure that was reported."""
    launch = read_launch(CoreLaunch)
    setup_logging(_PROCESS)
    try:
        CoreProcess(launch).run()
    except Exception:
        if envs.ATOM_LOG_MORE:
            traceback.print_exc()
        sys.exit(1)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    expected = isinstance(error, (ValueError, RuntimeError))
    return text if expected else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
