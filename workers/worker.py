"""A worker without its sockets: load the model, allocate the KV cache, execute steps."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.eplb import eplb_config
from atom.shared.config.kv_transfer import reads_peers
from atom.shared.messages.images import LoadImage
from atom.shared.messages.kv_tiers import PEER, REMOTE, StoredBlocks
from atom.shared.messages.worker import AllocateKV, ExpertLoad, Loaded, ScheduledBatch, stored_bytes
from atom.shared.utils.logger import describe, get_logger
from atom.shared.utils.redis_client import RedisClient
from atom_ops import backend
from parallel.mesh import Mesh
from parallel.transfer.nixl_agent import NixlAgent
from workers.batch.input_batch import InputBatch
from workers.cpu_threads import CpuThreads
from workers.expert_balancer import ExpertBalancer
from workers.grammar.library import GrammarLibrary
from workers.graphs.trace_ranges import add_module_ranges
from workers.layers.attention.cache_groups import StateGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer
from workers.memory.block_rows import BlockRows
from workers.memory.cache_fingerprint import cache_fingerprint
from workers.memory.disk_tier import DiskTier
from workers.memory.host_tier import HostTier
from workers.memory.kv_cache import (
    attention_backends,
    available_memory,
    cpu_kv_bytes,
    cuda_bytes_in_use,
    cuda_kv_bytes,
)
from workers.memory.lease_server import LeaseServer, cache_properties
from workers.memory.memory_guard import SMALLER_CACHE, SMALLER_STEPS, explain_out_of_memory
from workers.memory.peak import peak_bytes
from workers.memory.peer_tier import PeerTier, rank_address
from workers.memory.remote_tier import RemoteTier
from workers.memory.tier_copier import KVTier, LeasedKVTier, TierCopier, staged_bytes
from workers.model_runner import ModelRunner
from workers.pending_step import PendingStep
from workers.profiler import TraceRecorder
from workers.providers import resolve_ops
from workers.rank_model import build_rank, compute_dtype, rank_dispatch, rank_specs
from workers.runner_builder import Progress, RunnerBuilder
from workers.shape_coordination import CoordinatedStep
from workers.vision.image_store import ImageStore
from workers.warm_up import compile_model, tune, warm_up
from workers.weights.loader import (
    WeightError,
    describe_schemes,
    describe_weights,
    load_directory,
    load_dummy,
    weight_bytes,
)

_MOST_FILES = 8
_MOST_TIERS = 2


def worker_device(config: EngineConfig, index: int) -> torch.device:
    """The CPU, or the GPU of that index among the visible ones."""
    return torch.device("cpu") if config.device.device == "cpu" else torch.device("cuda", index)


def _cpu_threads(config: EngineConfig) -> CpuThreads | None:
    """What adapts the threads of a CPU worker that has several."""
    most = config.device.cpu_threads or 1
    if config.device.device != "cpu" or most == 1:
        return None
    return CpuThreads(most, os.sched_getaffinity(0))


class Worker:
    """Call `load`, then `allocate`, then `execute` for each step."""

    _model: CausalLM
    """Set by `load`."""
    _builder: RunnerBuilder
    """Set by `load`."""
    _runner: ModelRunner
    """Set by `allocate`."""
    _balancer: ExpertBalancer | None
    """Set by `load`; None without --enable-eplb."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, progress: Progress):
        self.tiers: TierCopier | None = None
        """Set by `allocate`, if blocks are kept outside of the KV cache."""
        self.stored: list[StoredBlocks] = []
        """Set by `allocate`: what tiers have from an earlier start."""
        self.leases: LeaseServer | None = None
        """Set by `allocate`, if other engines read blocks from the KV cache."""
        self._store: RedisClient | None = None
        self._files: DiskTier | None = None
        self.traces: TraceRecorder | None = None
        """None unless the configuration names a directory for traces."""
        self._config = config
        self._reported: list[float] | None = None
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._tp = mesh.tp
        self._dispatch = rank_dispatch(config, mesh)
        self._progress = progress
        self._device = mesh.device
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # kernels and graphs are launched on the current device
            self._used_before = cuda_bytes_in_use(self._device)
        assert config.scheduler.max_num_seqs is not None, "it is resolved before any worker starts"
        num_drafts = config.speculative.num_speculative_tokens
        self.grammars = GrammarLibrary(checkpoint, config.scheduler.max_num_seqs, num_drafts)
        self._cpu_threads = _cpu_threads(config)
        if config.observability.torch_profiler_dir is not None:
            directory = config.observability.torch_profiler_dir
            model = config.model.model
            self.traces = TraceRecorder(directory, model, mesh.tp.rank, self._device)

    def load(self) -> Loaded:
        """Build the model, load its weights and measure the memory of the largest step.

        Raises ValueError for a model that is not supported, MemoryError if the GPU is too small.
        """
        with explain_out_of_memory(self._device, "the weights and one step", SMALLER_STEPS):
            return self._load()

    def allocate(self, allocate: AllocateKV) -> None:
        """Allocate the KV cache, capture graphs and run warm-up steps.

        Raises MemoryError if the GPU is too small.
        """
        with explain_out_of_memory(self._device, "the KV cache and graphs next to the model", SMALLER_CACHE):
            self._allocate(allocate)

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        return self._model

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. With several ranks, raises MemoryError if the device lacks memory."""
        if self._cpu_threads is not None:
            self._cpu_threads.adjust()
        with (
            explain_out_of_memory(self._device, "a step", SMALLER_CACHE),
            self._traced_step(lambda: self._runner.label(batch)),
        ):
            return self._runner.launch(batch)

    def load_image(self, message: LoadImage) -> None:
        """Launch the vision tower on an image. Raises MemoryError if the device lacks memory."""
        with explain_out_of_memory(self._device, "an image", SMALLER_CACHE):
            self._images.load(message)

    def drop_image(self, key: bytes) -> None:
        """Free the features of an image."""
        self._images.drop(key)

    @property
    def _images(self) -> ImageStore:
        images = self._builder.images
        assert images is not None, "the core was told of no vision tower"
        return images

    def expert_load(self) -> ExpertLoad | None:
        """The last window's load of the experts, once, on the first of the ranks that share them."""
        balancer = self._balancer
        if balancer is None or self._mesh.ep.rank or balancer.imbalance is self._reported:
            return None
        self._reported = balancer.imbalance
        assert self._reported is not None, "it is another than before"
        return ExpertLoad(self._reported, balancer.moved)

    def idle_step(self, leaving: bool = False) -> CoordinatedStep:
        """Take part in a step of engines in lockstep without a batch; `leaving`: none will come any more.

        Launches a dummy step, unless no rank has a step or this rank's batch is on its way.
        """
        coordinator = self._builder.coordinator
        assert coordinator is not None, "the engines are in lockstep"
        agreed = coordinator.without_step(leaving)
        if agreed.shape is not None and not agreed.has_batch:
            with (
                explain_out_of_memory(self._device, "a step", SMALLER_CACHE),
                self._traced_step(lambda: "dummy"),
            ):
                self._runner.dummy_step(agreed.shape)
        return agreed

    def _load(self) -> Loaded:
        resolved = resolve_ops(self._device, self._config, self._checkpoint)
        if self._tp.rank == 0:
            describe("ops on %s: %s", self._device, backend.summary(resolved))
        for line in backend.warnings(self._device):
            get_logger().warning("%s", line)
        if self._tp.size > 1:
            width = self._checkpoint.hf_config["hidden_size"]
            self._tp.open_peers(width, compute_dtype(self._config), self._device)
        self._model = self._build_model()
        self._builder = RunnerBuilder(
            self._config,
            self._checkpoint,
            self._mesh,
            self._dispatch,
            self._model,
            self.grammars,
            self._progress,
        )
        if self._builder.has_trace_ranges:
            add_module_ranges(self._model)
        if self._model.overlap_tokens:
            self._tp.open_copies()
        if self._tp.rank == 0 and (backends := attention_backends(self._model.kv_groups)):
            describe("attention backends: %s", backends)
        self._balancer = self._make_balancer()
        if self._device.type == "cuda":
            # Kernels with programmatic dependent launch may read weights before earlier kernels end.
            torch.cuda.synchronize(self._device)
        for model in self._model.with_draft:
            name = "weights" if model is self._model else "weights of the draft model"
            describe("%s on rank %d: %s", name, self._tp.rank, describe_weights(model))
        tune(self._builder)
        compile_model(self._builder)
        self._builder.compile_kernels()
        specs = rank_specs(self._config, self._model)
        on_cpu = self._device.type == "cpu"
        room = available_memory() // self._config.parallel.workers_per_node if on_cpu else -1
        weights = sum(map(weight_bytes, self._model.with_draft))
        images = self._builder.images
        most = 0 if images is None else images.max_tokens
        return Loaded(self._tp.rank, specs, self._kv_bytes(), weights, room, most)

    def close(self) -> None:
        """End the threads of the tiers, the processes of one in files, and the connection of a remote one."""
        if self.tiers is not None:
            self.tiers.close()
        if self.leases is not None:
            self.leases.close()
        if self._store is not None:
            self._store.close()
        if self._files is not None:
            self._files.close()
        self.tiers = self._files = None
        self.leases = None
        self.stored = []

    def _allocate(self, allocate: AllocateKV) -> None:
        self.close()
        with self._tracing_captures():
            kv_layers = self._builder.kv_layers(allocate.num_blocks)
            inputs = self._builder.inputs(allocate.max_model_len, allocate.num_blocks)
            self._runner = self._builder.runner(kv_layers, inputs, self._builder.capture_sizes)
            if self._balancer is not None:
                self._runner.before_step = self._balancer.before_step
        sized = zip(self._model.kv_groups, allocate.num_blocks, strict=True)
        num_blocks = min(blocks for group, blocks in sized if not isinstance(group, StateGroup))
        capacity = num_blocks * self._config.block_tokens
        warm_up(self._builder, self._runner, min(capacity, allocate.max_model_len), self.idle_step)
        if allocate.tiers or allocate.lease_address:
            self._open_tiers(allocate, kv_layers, inputs)
        if self.traces is not None:
            self.traces.prepare()
        if self._device.type != "cpu" and self._tp.rank == 0:
            names = ", ".join(backend.ran_in_torch())
            tell = get_logger().info if names else describe
            tell("ops on %s that fell back to torch: %s", self._device, names or "none")

    def _open_tiers(self, allocate: AllocateKV, kv_layers: Sequence[CacheLayer], inputs: InputBatch) -> None:
        config = self._config
        specs = rank_specs(config, self._model)
        sizes = list(map(stored_bytes, specs))
        groups = []
        unused = 0
        for number, group in enumerate(self._model.kv_groups):
            layers = [kv_layers[layer] for layer in group.layers]
            if inputs.speculation is not None:
                layers += inputs.speculation.kept(number)
            places = group.places if isinstance(group, StateGroup) else 1
            num_blocks = allocate.num_blocks[number]
            groups.append(BlockRows(layers, num_blocks, sizes[number], places))
            unused += num_blocks * places * sizes[number] if self._device.type == "cpu" else 0
        room = available_memory() // config.parallel.workers_per_node - unused
        tiers: list[KVTier | LeasedKVTier] = []
        for index, slots in enumerate(allocate.tiers):
            if slots.medium == PEER:
                properties = self._cache_properties(groups)
                tiers.append(PeerTier(NixlAgent(), self._tp.rank, sizes, self._device, properties))
                continue
            if not slots.by_content:
                tiers.append(HostTier(slots.num_slots, sizes, self._device, room))
                continue
            layouts = [layout for group in groups for layout in group.layouts]
            is_remote = slots.medium == REMOTE
            fingerprint = cache_fingerprint(config, self._checkpoint, specs, layouts, by_content=is_remote)
            name = f"{fingerprint}-{self._tp.rank}"
            if is_remote:
                assert config.cache.kv_offload_remote_url is not None, "it has a remote tier"
                self._store = RedisClient(config.cache.kv_offload_remote_url)
                tiers.append(RemoteTier(self._store, name, len(specs), allocate.hash_seed))
                continue
            assert config.cache.kv_offload_dir is not None, "it has a tier in files"
            directory = Path(config.cache.kv_offload_dir) / name
            self._files = DiskTier(directory, len(specs), self._num_files(), max(sizes), self._device)
            tiers.append(self._files)
            self.stored.append(StoredBlocks(index, self._files.stored(slots.num_slots)))
        if tiers:
            self.tiers = TierCopier(groups, tiers, self._tp.rank)
        if allocate.lease_address:
            endpoint = rank_address(allocate.lease_address, self._tp.rank)
            properties = self._cache_properties(groups)
            secret = allocate.lease_secret
            self.leases = LeaseServer(NixlAgent(), endpoint, self._tp.rank, groups, properties, secret)

    def _cache_properties(self, groups: Sequence[BlockRows]) -> dict[str, str]:
        config = self._config
        fingerprint = ""
        if not config.parallel.prefill_engines:  # else all engines are of this server
            specs = rank_specs(config, self._model)
            layouts = [layout for group in groups for layout in group.layouts]
            fingerprint = cache_fingerprint(config, self._checkpoint, specs, layouts, by_content=True)
        ranks = config.parallel.tensor_parallel_size
        return cache_properties(config.block_tokens, ranks, str(compute_dtype(config)), groups, fingerprint)

    def _num_files(self) -> int:
        """Files of a tier that are read, and written, at the same time. On a CPU the cores compute."""
        if self._device.type == "cpu":
            return 1
        cores = len(os.sched_getaffinity(0)) // self._config.parallel.workers_per_node
        return max(1, min(cores // 2, _MOST_FILES))

    def _build_model(self) -> CausalLM:
        model = build_rank(self._config, self._checkpoint, self._mesh, self._dispatch)
        for each in model.with_draft:
            for line in describe_schemes(each) if self._tp.rank == 0 else ():
                describe("quantization: %s", line)
            if self._config.model.load_dummy:
                load_dummy(each, lambda done, total: self._progress("Filling weights", done, total))
            elif each is model:
                self._load_weights(model)
        if model.draft is not None and not self._config.model.load_dummy:
            load_directory(
                model.draft.model,
                model.draft.directory,
                lambda done, total: self._progress("Loading the draft model", done, total),
            )
        return model

    def _make_balancer(self) -> ExpertBalancer | None:
        config = eplb_config(self._config.parallel)
        if config is None:
            return None
        balancer = ExpertBalancer(self._model, self._mesh.ep, config)
        if self._config.model.load_dummy:
            balancer.copy_replicas()
        return balancer

    def _load_weights(self, model: CausalLM) -> None:
        directory = Path(self._checkpoint.directory)
        changes = self._config.model.hf_overrides
        try:
            load_directory(
                model, directory, lambda done, total: self._progress("Loading weights", done, total)
            )
        except WeightError as error:
            if changes is None:
                raise
            raise WeightError(
                f"{error}; with --hf-overrides {changes} the weights must still fit, or be left out with "
                "--load-dummy"
            ) from None

    def _traced_step(self, label: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """A range of this name in the trace, while one is recorded."""
        if self.traces is None or not self.traces.recording:
            return contextlib.nullcontext()
        return self.traces.step(label())

    def _tracing_captures(self) -> contextlib.AbstractContextManager[None]:
        """Trace the captures: the replay of a graph does not name the modules of its kernels."""
        if self.traces is None or not self._builder.has_trace_ranges or not self._builder.capture_sizes:
            return contextlib.nullcontext()
        return self.traces.capture()

    def _kv_bytes(self) -> int:
        if self._device.type == "cpu":
            return cpu_kv_bytes(self._config.cache, self._config.parallel.workers_per_node)
        peak = peak_bytes(self._builder)
        if self._config.cache.offloads:
            peak += _MOST_TIERS * staged_bytes(rank_specs(self._config, self._model))
        if reads_peers(self._config.cache):
            peak += 2 * staged_bytes(rank_specs(self._config, self._model))
        return cuda_kv_bytes(self._config.cache, self._device, peak, self._used_before)
