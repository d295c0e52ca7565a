"""What each rank of a process group does to test layouts. Free of transformers, so that it starts fast.

Every rank runs the jobs in the same order; a job is one model in one layout, under mixed load.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.messages.worker import AllocateKV, ScheduledBatch
from parallel import communicator
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.helpers.core_side import CoreSide, generate
from tests.helpers.layouts import Layout
from workers.worker import Worker

BLOCKS, BLOCK_SIZE = 64, 4
CHUNK, STAGGER = 16, 2
NEW_TOKENS = 12
_CPU = torch.device("cpu")


class Job(msgspec.Struct, frozen=True):
    """One model in one layout."""

    config: EngineConfig
    """Of the layout."""
    checkpoint: Checkpoint
    layout: Layout
    prompts: list[list[int]]


class Outcome(msgspec.Struct, frozen=True):
    """What one rank found."""

    ids: list[list[int]]
    """Greedy ids of each prompt."""
    steps: int
    sampled_steps: int
    """Of these, the steps that sampled."""
    collectives: dict[str, int]
    """Calls of each kind in these steps."""
    weight_bytes: int


def run(job: Job, mesh: Mesh) -> Outcome:
    """Prompts in chunks, of which later ones join while earlier ones decode."""
    worker = Worker(job.config, job.checkpoint, mesh, lambda *progress: None)
    loaded = worker.load()
    specs = loaded.kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), job.checkpoint.max_model_len))
    sampled: list[bool] = []

    def execute(batch: ScheduledBatch) -> bytes:
        ids = worker.execute(batch).token_ids()
        sampled.append(bool(ids))
        return ids

    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE)
    with _counted_collectives() as counts:
        ids = generate(core, execute, job.prompts, NEW_TOKENS, CHUNK, STAGGER)
    return Outcome(ids, len(sampled), sum(sampled), dict(counts), loaded.weight_bytes)


def run_all(path: Path, rank: int, ranks: int) -> None:
    """Run a file's jobs on the first ranks of the process group; prints each one's Outcome, or null."""
    jobs = msgspec.json.decode(path.read_bytes(), type=list[Job])
    # Every rank makes all groups: torch requires it.
    groups = {size: dist.new_group(list(range(size))) for size in range(2, ranks + 1)}
    found = []
    for job in jobs:
        if rank >= job.layout.ranks:
            found.append(None)
            continue
        mesh = _mesh(job.layout, rank, groups)
        found.append(run(job, mesh))
        mesh.close()
    print(msgspec.json.encode(found).decode())


def _mesh(layout: Layout, rank: int, groups: dict[int, dist.ProcessGroup]) -> Mesh:
    tp = Communicator(rank, layout.tp, groups[layout.tp])
    return Mesh(_CPU, tp=tp, ep=tp)


@contextmanager
def _counted_collectives() -> Iterator[Counter[str]]:
    """Counts the calls of torch.distributed."""
    counts: Counter[str] = Counter()

    def counted(kind: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return call(*args, **kwargs)

        return counting

    places = {
        "all_reduce": (dist, "all_reduce"),
        "all_to_all": (dist, "all_to_all_single"),
        "all_gather": (communicator, "_all_gather"),
        "reduce_scatter": (communicator, "_reduce_scatter"),
    }
    with ExitStack() as stack:
        for kind, (module, name) in places.items():
            stack.enter_context(patch.object(module, name, counted(kind, getattr(module, name))))
        yield counts
