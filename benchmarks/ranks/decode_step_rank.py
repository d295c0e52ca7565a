"""One rank of `benchmarks.decode_step`: a worker with a decode batch, and what its steps take.

Every rank runs the same steps. As a process it is a rank beyond 0, which prints nothing.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import Sampling, pack_ids, unpack_ids
from atom.shared.messages.kv_tiers import TierSlots
from atom.shared.messages.launch import Rendezvous
from atom.shared.messages.worker import (
    AllocateKV,
    NewRow,
    RecurrentStateSpec,
    ScheduledBatch,
    SlidingWindowSpec,
)
from atom.shared.utils.process import read_launch
from engine_core.startup import plan_cache
from parallel.mesh import MeshShape, join_mesh
from tools.traces.stream_time import times_without_waiting
from workers.pending_step import PendingStep
from workers.worker import Worker, worker_device

_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_TRACED = 4
_JOIN_S = 120.0


class DecodeStepLaunch(msgspec.Struct, frozen=True):
    """For `python -m benchmarks.ranks.decode_step_rank`."""

    config: EngineConfig
    checkpoint: Checkpoint
    rows: list[int]
    """Number of rows of each decode batch, one after another."""
    context: int
    steps: int
    rank: int = 0
    where: Rendezvous | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step."""

    name: str
    runs: int
    microseconds: float
    """Sum over all runs of the kernel, without their wait for previous kernels."""


@dataclass(frozen=True)
class Row:
    """The figures of one number of rows."""

    rows: int
    tokens: float
    """Tokens by which a row advances in a step: 1 without drafts."""
    device_ms: float
    ahead_ms: float
    launch_ms: float
    kernels: float
    kernels_per_layer: float


class Steps:
    """A worker with a decode batch."""

    def __init__(self, launch: DecodeStepLaunch, tiers: Sequence[TierSlots] = ()):
        """Returns when all ranks have made theirs."""
        self._config = config = launch.config
        self._checkpoint = checkpoint = launch.checkpoint
        self.layers = int(checkpoint.hf_config["num_hidden_layers"])
        self._drafts = config.speculative.num_speculative_tokens
        parallel = config.parallel
        device = worker_device(config, launch.rank)
        shape = MeshShape(tp=parallel.tensor_parallel_size, dcp=parallel.decode_context_parallel_size)
        mesh = join_mesh(shape, launch.rank, launch.where, device, _JOIN_S)
        self.worker = Worker(config, checkpoint, mesh, _say if launch.rank == 0 else _say_nothing)
        loaded = self.worker.load()
        plan = plan_cache(config, checkpoint.max_model_len, [loaded])
        self.num_blocks = plan.num_blocks
        self._max_model_len = plan.max_model_len
        self.specs = plan.specs
        self._is_state = [isinstance(spec, RecurrentStateSpec) for spec in plan.specs]
        self.worker.allocate(AllocateKV(plan.num_blocks, plan.max_model_len, list(tiers)))

    def start(self, rows: int, context: int, steps: int) -> None:
        """Prefill `rows` prompts of `context` random tokens, with blocks for `steps` more tokens.

        A step computes as many prompts as --max-num-batched-tokens allows, one at least.
        """
        size = self._config.block_tokens
        steps *= 1 + self._drafts
        if context + steps > self._max_model_len:
            raise SystemExit(f"error: {context} + {steps} tokens: --max-model-len is {self._max_model_len}")
        # A recurrent layer has one slot for a row.
        each = [1 if is_state else -(-(context + steps) // size) for is_state in self._is_state]
        # A window's cache has room for what is visible: blocks that have left it take what comes.
        own = [
            min(wanted, blocks // rows) if isinstance(spec, SlidingWindowSpec) else wanted
            for wanted, blocks, spec in zip(each, self.num_blocks, self.specs, strict=True)
        ]
        if any(not 0 < rows * count <= blocks for count, blocks in zip(own, self.num_blocks, strict=True)):
            raise SystemExit(f"error: {rows} rows of {context + steps} tokens do not fit the KV cache")
        source = np.random.default_rng(rows)
        new = [
            NewRow(
                row,
                context,
                0,
                [
                    [row * count + number % count for number in range(wanted)]
                    for wanted, count in zip(each, own, strict=True)
                ],
                _GREEDY,
                context,
            )
            for row in range(rows)
        ]
        self._names = list(range(rows))
        ids = source.integers(0, self._checkpoint.vocab_size, rows * context)
        together = max(1, (self._config.scheduler.max_num_batched_tokens or context) // context)
        for first in range(0, rows, together):
            names = self._names[first : first + together]
            prompts = pack_ids(ids[first * context : (first + len(names)) * context].tolist())
            counts = [context] * len(names)
            batch = ScheduledBatch(first, names, counts, new[first : first + together], token_ids=prompts)
            failed = self.worker.execute(batch).result().failed
            if failed:
                raise SystemExit(f"error: a prompt of {context} tokens failed: {failed[0].reason}")

    def launch(self) -> PendingStep:
        """Launch one decode step."""
        return self.worker.execute(ScheduledBatch(1, self._names, num_drafts=self._drafts))

    def device_ms(self, steps: int) -> float:
        """Milliseconds from step to step while the device always has work."""
        first = torch.Event("cuda", enable_timing=True)
        last = torch.Event("cuda", enable_timing=True)
        self.launch()  # so that the device is busy when the first event is queued
        first.record()
        for _ in range(steps):
            pending = self.launch()
        last.record()
        pending.result()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / steps

    def ahead_ms(self, steps: int) -> tuple[float, float, float]:
        """Milliseconds of a step and of its launch, and tokens by which a row advances."""
        launches = []
        tokens = 0
        earlier = self.launch()
        started = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            later = self.launch()
            launches.append(time.perf_counter() - before)
            tokens += len(unpack_ids(earlier.result().token_ids))
            earlier = later
        whole = time.perf_counter() - started
        earlier.result()
        return whole / steps * 1e3, statistics.median(launches) * 1e3, tokens / steps / len(self._names)

    def kernels(self) -> list[Kernel]:
        """The kernels of a step, longest first."""
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(_TRACED):
                self.launch().result()
        return kernels_of(trace.events(), _TRACED)


def kernels_of(events: Iterable[FunctionEvent], steps: int) -> list[Kernel]:
    """The kernels of each of `steps` steps, longest first."""
    # Ranges marked on the host also appear on the device, but are not kernels.
    on_device = [one for one in events if one.device_type.name == "CUDA" and not one.is_user_annotation]
    on_device.sort(key=lambda one: one.time_range.start)
    spans = [
        (
            (one.device_index, one.device_resource_id),
            round(one.time_range.start * 1e3),
            round(one.time_range.end * 1e3),
        )
        for one in on_device
    ]
    times: dict[str, list[int]] = defaultdict(list)
    for one, time_ns in zip(on_device, times_without_waiting(spans), strict=True):
        if not one.key.startswith("Mem"):
            times[one.key].append(time_ns)
    found = [
        Kernel(name, round(len(runs) / steps), round(sum(runs) / steps / 1e3, 1))
        for name, runs in times.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def measure(steps: Steps, rows: int, context: int, count: int) -> tuple[Row, list[Kernel]]:
    """The figures of one number of rows, and the kernels of its step."""
    steps.start(rows, context, 3 * count + 32)
    for _ in range(8):
        last = steps.launch()
    last.result()  # else the first figure has these steps in it
    ahead, launch, tokens = steps.ahead_ms(count)
    device = steps.device_ms(count)
    kernels = steps.kernels()
    total = sum(kernel.runs for kernel in kernels)
    per_layer = round(total / steps.layers, 2)
    tokens, device, ahead, launch = (round(each, 4) for each in (tokens, device, ahead, launch))
    return Row(rows, tokens, device, ahead, launch, total, per_layer), kernels


def measure_all(launch: DecodeStepLaunch) -> list[tuple[Row, list[Kernel]]]:
    """`measure` for each number of rows."""
    steps = Steps(launch)
    return [measure(steps, rows, launch.context, launch.steps) for rows in launch.rows]


def _say(phase: str, done: int, total: int) -> None:
    if done == total:
        print(f"{phase}: {total}", file=sys.stderr)


def _say_nothing(phase: str, done: int, total: int) -> None: ...


if __name__ == "__main__":
    measure_all(read_launch(DecodeStepLaunch))
