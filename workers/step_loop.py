"""A worker's main loop: messages of the core in, steps and results out."""

import gc
import math
import time
from collections import deque
from typing import Protocol

import msgspec

from atom.shared.messages.admin import SetLogLevel
from atom.shared.messages.grammar import DropGrammar, LoadGrammar
from atom.shared.messages.images import DropImage, LoadImage
from atom.shared.messages.kv_peers import EndLeases, ReleaseLease
from atom.shared.messages.kv_tiers import CopyBlocks, FindBlocks
from atom.shared.messages.profile import Profile, RankTrace
from atom.shared.messages.worker import (
    AllocateKV,
    ScheduledBatch,
    Shutdown,
    StepsDone,
    ToWorker,
    WorkerReady,
)
from atom.shared.utils.logger import set_log_level
from atom.shared.utils.step_trace import StepTrace
from workers.pending_step import PendingStep
from workers.waves import Waves
from workers.worker import Worker

__all__ = ["CoreConnection", "LockstepLoop", "StepLoop"]

_IDLE_POLL_MS = 1000
_SOON_POLL_MS = 20
_LOADING_POLL_MS = 2
_DEVICE_POLL_S = 50e-6
_LEAVE_S = 5.0
# How long the ranks of other engines wait for a core that is about to send its next batch.
_CORE_S = 0.5


class CoreConnection(Protocol):
    """The connection to the engine core."""

    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, timeout_ms: int) -> ToWorker | None:
        """The core's next message; None after the timeout, or earlier when another rank begins a wave."""


class StepLoop:
    """Runs until Shutdown: launches each step when it arrives, sends its result when the device is done."""

    def __init__(self, worker: Worker, link: CoreConnection, rank: int, trace: StepTrace):
        self._worker = worker
        self._link = link
        self._rank = rank
        self._trace = trace
        self._pending: deque[PendingStep] = deque()
        self._ended = False

    def run(self) -> None:
        """Returns after Shutdown."""
        while not self._ended:
            # The device completes steps in the order of their launch.
            if self._pending and self._pending[0].ready():
                self._link.send(self._pending.popleft().result())
                continue
            self._send_finished()
            message = self._link.receive(self._wait_ms())
            if message is not None:
                self._process(message)
            else:
                self._without_message()

    def _wait_ms(self) -> int:
        """How long to wait for a message."""
        if self._pending:
            return 0
        tiers = self._worker.tiers
        if self._worker.grammars.is_loading or (tiers is not None and tiers.is_busy):
            return _LOADING_POLL_MS
        traces = self._worker.traces
        if self._worker.leases is not None or (traces is not None and traces.writing):
            return _SOON_POLL_MS  # a prompt may wait for the blocks that readers have released
        return _IDLE_POLL_MS

    def _send_finished(self) -> None:
        """Send what is completed between steps: copies, loaded grammars, traces, windows of expert load."""
        grammars = self._worker.grammars
        tiers = self._worker.tiers
        while tiers is not None and (copied := tiers.next_copied()) is not None:
            self._link.send(copied)
        leases = self._worker.leases
        if leases is not None and (released := leases.next_released()) is not None:
            self._link.send(released)
        traces = self._worker.traces
        while (loaded := grammars.next_loaded()) is not None:
            self._link.send(loaded)
        while traces is not None and (trace_result := traces.next_result()) is not None:
            self._link.send(trace_result)
        if (load := self._worker.expert_load()) is not None:
            self._link.send(load)

    def _process(self, message: ToWorker) -> None:
        traces = self._worker.traces
        match message:
            case ScheduledBatch():
                self._trace.mark("start", message.step)
                step = self._worker.execute(message)
                self._trace.mark("end", message.step)
                if self._rank == 0:  # every rank samples the same tokens
                    self._pending.append(step)
            case AllocateKV():
                self._worker.allocate(message)
                gc.collect()
                gc.freeze()  # exclude the model from garbage collection
                self._link.send(WorkerReady(self._rank, self._worker.stored))
            case Profile(on) if traces is not None:
                traces.switch(on)
            case Profile(on):
                self._link.send(RankTrace(self._rank, on, error="the worker has no directory for traces"))
            case LoadGrammar() if self._rank == 0:
                self._worker.grammars.load(message)
            case DropGrammar(key) if self._rank == 0:
                self._worker.grammars.drop(key)
            case LoadGrammar() | DropGrammar():
                pass  # rank 0 sends the masks of its rows
            case CopyBlocks() | FindBlocks() | ReleaseLease():
                assert self._worker.tiers is not None, "the core was told of no tier"
                self._worker.tiers.submit(message)
            case EndLeases(slots):
                assert self._worker.leases is not None, "the core was told of no leases"
                self._worker.leases.end(slots)
            case LoadImage():
                self._worker.load_image(message)
            case DropImage(key):
                self._worker.drop_image(key)
            case SetLogLevel(level):
                set_log_level(level)
            case Shutdown():
                self._ended = True
            case StepsDone():
                pass

    def _without_message(self) -> None:
        if self._pending:
            time.sleep(_DEVICE_POLL_S)


class LockstepLoop(StepLoop):
    """Steps with the ranks of other engines: without a batch while another has one, it runs dummy steps.

    From the first batch until StepsDone it waits for the next message instead: a dummy step would delay
    the batch that the core is about to send. It waits for a short time only, so that a core that hangs does
    not stop the other engines. After Shutdown it takes part until all ranks leave.
    """

    def __init__(self, worker: Worker, link: CoreConnection, rank: int, trace: StepTrace, waves: Waves):
        super().__init__(worker, link, rank, trace)
        self._waves = waves
        self._wait_until = 0.0
        self._leave_at: float | None = None

    @property
    def _steps_idly(self) -> bool:
        return self._waves.is_awake and time.monotonic() >= self._wait_until

    def _wait_ms(self) -> int:
        wait_ms = super()._wait_ms()
        if not self._waves.is_awake:
            return wait_ms
        left_ms = (self._wait_until - time.monotonic()) * 1000
        return max(0, math.ceil(min(wait_ms, left_ms)))

    def _process(self, message: ToWorker) -> None:
        match message:
            case ScheduledBatch():
                self._waves.begin()
                super()._process(message)
                self._wait_until = time.monotonic() + _CORE_S
            case StepsDone():
                self._wait_until = 0.0
            case Shutdown():
                self._wait_until = 0.0
                self._leave_at = time.monotonic() + _LEAVE_S
                self._waves.begin()
            case _:
                super()._process(message)

    def _without_message(self) -> None:
        if not self._steps_idly:
            super()._without_message()
        else:
            self._idle_step()
        if self._leave_at is not None and time.monotonic() > self._leave_at:
            self._ended = True  # the others hang: they are killed

    def _idle_step(self) -> None:
        agreed = self._worker.idle_step(leaving=self._leave_at is not None)
        if agreed.shape is None:
            self._waves.end()
            self._ended = agreed.all_leave
        elif agreed.has_batch:
            self._wait_until = math.inf  # its batch is on its way, and this step is agreed on
