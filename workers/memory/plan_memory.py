"""The memory that a model needs, from its configuration alone: weights and KV cache of every rank.

The model is built on torch's meta device, where tensors have shapes and no bytes, by the code that a
worker builds it with, and its layers are processed as after loading. Prints a `PlanResult` on standard
output, in one line.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.plan import LayoutPlan, PlanLaunch, PlanResult, RankPlan
from atom.shared.utils import envs
from atom.shared.utils.errors import disk_full_line, one_line
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import read_launch
from atom_ops import backend
from parallel.communicator import Communicator
from parallel.mesh import Mesh, MeshShape
from workers.expert_balancer import buffer_bytes
from workers.layers.causal_lm import CausalLM
from workers.memory.kv_cache import available_memory, cpu_kv_bytes
from workers.providers import resolve_ops
from workers.rank_model import build_rank, rank_dispatch, rank_specs
from workers.weights.loader import weight_bytes, weight_sizes
from workers.weights.plan import weighted_layers

_META = torch.device("meta")
_LOGIT_BYTES = 4


def main() -> None:
    """Entry point of `python -m workers.memory.plan_memory`."""
    launch = read_launch(PlanLaunch)
    status = ExitStatus.DONE
    try:
        result = plan(launch)
    except Exception as error:
        if envs.ATOM_LOG_MORE:
            traceback.print_exc()
        full = disk_full_line(error, envs.ATOM_CACHE_DIR)
        status = ExitStatus.MODEL if isinstance(error, ValueError) else ExitStatus.FAILURE
        status = ExitStatus.RESOURCES if full else status
        result = PlanResult(error=full or one_line(error, ValueError))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.exit(status)


def plan(launch: PlanLaunch) -> PlanResult:
    """Plan every layout of `launch`. Raises ValueError if the configured one is not supported."""
    config = launch.config
    size = launch.config.parallel.tensor_parallel_size
    if launch.gpu_bytes is None:
        resolve_ops(torch.device(config.device.device), config, launch.checkpoint)
    else:
        backend.resolve(_META)  # no provider: plain weights and the default KV layout
    memory = _memory(config, launch.checkpoint.vocab_size, launch.gpu_bytes)
    layouts = []
    for each in launch.sizes:
        try:
            layouts.append(LayoutPlan(each, _ranks(config, launch.checkpoint, each, memory)))
        except ValueError as error:
            if each == size:
                raise
            layouts.append(LayoutPlan(each, [], one_line(error, ValueError)))
    return PlanResult(layouts=layouts, device_bytes=memory.device_bytes, logits_bytes=memory.logits_bytes)


def planned_rank(config: EngineConfig, checkpoint: Checkpoint, rank: int, size: int) -> tuple[CausalLM, int]:
    """The model of a rank of engine 0 on the meta device, processed as after loading. Raises ValueError.

    Also the bytes that the dispatch of its experts reserves.
    """
    parallel = config.parallel
    shape = MeshShape(size, parallel.engines_in_mesh, dcp=parallel.decode_context_parallel_size)
    mesh = Mesh(
        _META,
        tp=Communicator(rank, size),
        dcp=Communicator(rank % shape.dcp, shape.dcp),
        dp=Communicator(0, shape.dp),
        ep=Communicator(rank, shape.size),
    )
    dispatch = rank_dispatch(config, mesh)
    with _META:
        model = build_rank(config, checkpoint, mesh, dispatch)
        for each in model.with_draft:
            for _, layer in weighted_layers(each):
                layer.process_weights_after_loading()
    return model, dispatch.reserved_bytes


@dataclass(frozen=True)
class _Memory:
    """The memory for workers, in bytes."""

    config: EngineConfig
    device_bytes: int
    """Memory of the smallest GPU; on a CPU what this host has available, for all workers together."""
    usable: int
    """The part of it that ATOM may use."""
    logits_bytes: int
    """Memory of the logits of the largest step."""

    def left(self, weights: Sequence[int], rank: int) -> int:
        """What the weights leave for a rank; `weights` has those of every rank on a CPU."""
        if self.config.device.device == "cuda":
            return self.usable - weights[rank]
        engines = self.config.parallel.data_parallel_size
        return (self.usable - engines * sum(weights)) // (engines * len(weights))

    def kv_bytes(self, weights: Sequence[int], rank: int) -> int:
        """For the KV cache of a rank; on a GPU at most, because a step is measured at start."""
        if self.config.device.device == "cuda":
            left = max(self.left(weights, rank) - self.logits_bytes, 0)
            return self.config.cache.kv_cache_memory_bytes or left
        engines = self.config.parallel.data_parallel_size
        return cpu_kv_bytes(self.config.cache, engines * len(weights), engines * sum(weights))


def _memory(config: EngineConfig, vocab_size: int, gpu_bytes: int | None) -> _Memory:
    share = config.cache.gpu_memory_utilization
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    logits = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * vocab_size * _LOGIT_BYTES
    if gpu_bytes is not None:
        return _Memory(config, gpu_bytes, int(share * gpu_bytes), logits)
    if config.device.device == "cpu":
        available = available_memory()
        return _Memory(config, available, available, logits)
    memory = [torch.cuda.mem_get_info(gpu) for gpu in range(torch.cuda.device_count())]
    usable = min(min(int(share * total), free) for free, total in memory)
    return _Memory(config, min(total for _, total in memory), usable, logits)


def _ranks(config: EngineConfig, checkpoint: Checkpoint, size: int, memory: _Memory) -> list[RankPlan]:
    """All ranks of the configured layout, rank 0 of another one: no other rank has more."""
    ranks = range(size if size == config.parallel.tensor_parallel_size else 1)
    planned = [planned_rank(config, checkpoint, rank, size) for rank in ranks]
    models = [model for model, _ in planned]
    reserved = planned[0][1]
    weights = [sum(map(weight_bytes, model.with_draft)) for model in models]
    workers = size * config.parallel.engines_in_mesh
    buffers = buffer_bytes(models[0], workers) if config.parallel.enable_eplb else 0
    taken = [each + buffers + reserved for each in weights]
    return [
        RankPlan(
            rank,
            weights[rank],
            _sizes(model),
            rank_specs(config, model),
            memory.kv_bytes(taken, rank),
            memory.left(weights, rank),
            buffers,
            reserved,
        )
        for rank, model in enumerate(models)
    ]


def _sizes(model: CausalLM) -> dict[str, int]:
    """Bytes of the weights by type, those of a draft model included."""
    sizes = Counter[str]()
    for each in model.with_draft:
        sizes.update({name: sum(held) for name, held in weight_sizes(each).items()})
    return dict(sorted(sizes.items()))


if __name__ == "__main__":
    main()
