"""What each rank of a process group does to test layouts. Free of transformers, so that it starts fast.

Every rank runs the jobs in the same order; a job is one model in one layout, under mixed load.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from atom.shared.config import eplb
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.worker import AllocateKV, ExpertLoad, ScheduledBatch
from parallel import communicator
from parallel.communicator import Communicator
from parallel.host_group import HostGroup
from parallel.mesh import GroupName, Mesh
from parallel.rendezvous import MeetingPoint
from tests.helpers.engine.core_side import CoreSide, generate
from tests.helpers.parallel.layouts import Layout
from workers import expert_balancer
from workers.layers.moe.moe import Experts
from workers.worker import Worker

BLOCKS = 64
CHUNK, STAGGER = 16, 2
NEW_TOKENS = 8
Around = Callable[[Mesh], AbstractContextManager[None]]
_CPU = torch.device("cpu")
_NAMES: tuple[GroupName, ...] = ("tp", "dcp", "dp", "ep")
"""In the order of `Mesh`."""


class Job(msgspec.Struct, frozen=True):
    """One model in one layout."""

    config: EngineConfig
    """The configuration of the layout."""
    checkpoint: Checkpoint
    layout: Layout
    prompts: list[list[int]]


class Outcome(msgspec.Struct, frozen=True):
    """What one rank found."""

    ids: list[list[int]]
    """Greedy ids of each prompt of this engine."""
    steps: int
    """Dummy steps, too."""
    sampled_steps: int
    """Those of the steps that sampled."""
    cached_steps: int
    """The steps that read the KV cache: in the others every row begins."""
    dummy_steps: int
    moe_layers: int
    collectives: dict[str, int]
    """Calls of each kind in these steps."""
    weight_bytes: int
    expert_bytes: int
    """The part of the weights that are experts'."""
    load: ExpertLoad | None = None
    """The last window's, on rank 0."""


def run(job: Job, mesh: Mesh) -> Outcome:
    """Prompts in chunks, of which later ones join while earlier ones decode; shared out over engines."""
    worker = Worker(job.config, job.checkpoint, mesh, lambda *progress: None)
    loaded = worker.load()
    specs = loaded.kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), job.checkpoint.max_model_len))
    sampled: list[bool] = []
    cached: list[bool] = []

    def execute(batch: ScheduledBatch) -> bytes:
        ids = worker.execute(batch).result().token_ids
        sampled.append(bool(ids))
        cached.append(len(batch.new_rows) < len(batch.rows))
        return ids

    core, dummy_steps = CoreSide.of_specs(specs, BLOCKS, job.config.block_tokens), 0
    with _counted_collectives() as counts:
        prompts = job.prompts[mesh.dp.rank :: mesh.dp.size]
        ids = generate(core, execute, prompts, NEW_TOKENS, CHUNK, STAGGER)
        while mesh.dp.size > 1 and worker.idle_step().shape is not None:
            dummy_steps += 1
    model = worker._model
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    return Outcome(
        ids,
        len(sampled) + dummy_steps,
        sum(sampled),
        sum(cached),
        dummy_steps,
        len(experts),
        dict(counts),
        loaded.weight_bytes,
        sum(tensor.nbytes for layer in experts for tensor in layer.held_tensors()),
        worker.expert_load(),
    )


def run_all(
    path: Path,
    rank: int,
    around: Around = lambda mesh: nullcontext(),
    meeting: MeetingPoint | None = None,
) -> None:
    """Run a file's jobs on the first ranks of the process group; prints each one's Outcome, or null.

    Each job runs within `around(mesh)`; `meeting` is where the ranks have met.
    """
    jobs = msgspec.json.decode(path.read_bytes(), type=list[Job])
    # Every rank makes all groups: torch requires it.
    wanted = {group for job in jobs for name in _NAMES for group in job.layout.shape.groups(name)}
    groups = {group: dist.new_group(list(group)) for group in sorted(wanted) if len(group) > 1}
    found = []
    for job in jobs:
        if rank >= job.layout.ranks:
            found.append(None)
            continue
        mesh = _mesh(job.layout, rank, groups)
        with ExitStack() as stack:
            if job.layout.moving_experts:  # within the few steps of a test
                for module in (eplb, expert_balancer):
                    stack.enter_context(patch.object(module, "SETTLING_STEPS", 2))
            stack.enter_context(around(mesh))
            found.append(run(job, replace(mesh, meeting=meeting)))
        mesh.close()
    print(msgspec.json.encode(found).decode())


def _mesh(layout: Layout, rank: int, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> Mesh:
    def communicator(name: GroupName) -> Communicator:
        (group,) = (group for group in layout.shape.groups(name) if rank in group)
        return Communicator(group.index(rank), len(group), groups.get(group))

    host = HostGroup(rank, groups[tuple(range(layout.ranks))]) if layout.dp > 1 else None
    return Mesh(_CPU, *map(communicator, _NAMES), host=host)


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
