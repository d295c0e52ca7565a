"""A worker without its sockets: load the model, allocate the KV cache, execute steps."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS
from atom.shared.config.engine import EngineConfig
from atom.shared.config.eplb import eplb_config
from atom.shared.messages.engine import Sampling, pack_ids
from atom.shared.messages.worker import AllocateKV, ExpertLoad, Loaded, NewRow, ScheduledBatch
from atom.shared.utils import envs
from atom.shared.utils.logger import get_logger
from atom_ops import BATCH_INVARIANT_SPLIT, backend
from parallel.mesh import Mesh
from workers.agreement import Agreed, Agreement
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.group_rows import GroupRows
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import StateSlots
from workers.batch.step_padding import pad_groups
from workers.batch.step_shape import GraphSizes, no_agreement
from workers.expert_balancer import ExpertBalancer
from workers.grammar.library import GrammarLibrary
from workers.graphs.graph_modes import GraphSettings, capture_graphs
from workers.graphs.marks import mark_modules
from workers.layers.attention.cache_groups import CacheGroup, StateGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext
from workers.layers.linear import Linear
from workers.memory.kv_cache import (
    allocate_kv,
    attention_backends,
    cpu_kv_bytes,
    cuda_bytes_in_use,
    cuda_kv_bytes,
    kv_dtype,
)
from workers.memory.largest_steps import largest_steps, num_blocks, profile_batch
from workers.memory.memory_guard import MemoryGuard
from workers.model_runner import Graphs, ModelRunner
from workers.pending_step import PendingStep, event_recorder
from workers.profiler import TraceRecorder
from workers.providers import resolve_ops
from workers.rank_model import build_rank, compute_dtype, longest_sequence, rank_dispatch, rank_specs
from workers.sampling.sampler import Sampler
from workers.spec_decode.methods import method_of
from workers.weights.loader import (
    WeightError,
    describe_schemes,
    describe_weights,
    load_directory,
    load_dummy,
    weight_bytes,
)

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""

_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_WARM_TOKENS = 128
_WARM_DECODES = 2

_SMALLER_STEPS = "lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs with -tp"
_SMALLER_CACHE = (
    "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or capture fewer --cudagraph-capture-sizes"
)


@contextlib.contextmanager
def _explain_out_of_memory(device: torch.device, purpose: str, remedy: str) -> Iterator[None]:
    """Raise MemoryError with a remedy in place of torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError:
        if device.type != "cuda":
            raise
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        raise MemoryError(
            f"{device} has too little memory for {purpose}: {free >> 20} of its {total >> 20} MiB are free, "
            f"{allocated >> 20} are allocated by this worker, {(total - free - allocated) >> 20} are used by "
            f"other processes, the driver and caches: {remedy}"
        ) from None


def worker_device(config: EngineConfig, index: int) -> torch.device:
    """The CPU, or the GPU of that index among the visible ones."""
    return torch.device("cpu") if config.device.device == "cpu" else torch.device("cuda", index)


def _rows_of(group: CacheGroup, limits: BatchLimits) -> GroupRows:
    return StateSlots(limits) if isinstance(group, StateGroup) else BlockTable(limits)


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    """Run a step at start, where no row may fail: raises torch.OutOfMemoryError."""
    for failure in runner.launch(batch).result().failed:
        raise torch.OutOfMemoryError(failure.reason)


class Worker:
    """Call `load`, then `allocate`, then `execute` for each step."""

    _model: CausalLM
    """Set by `load`."""
    _runner: ModelRunner
    """Set by `allocate`."""
    _balancer: ExpertBalancer | None
    """Set by `load`; None without --enable-eplb."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, progress: Progress):
        self.traces: TraceRecorder | None = None
        """None unless the configuration names a directory for traces."""
        self._config = config
        self._reported: list[float] | None = None
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._tp = mesh.tp
        self._dispatch = rank_dispatch(config, mesh)
        self._agreement: Agreement | None = None
        self._progress = progress
        self._device = mesh.device
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # kernels and graphs are launched on the current device
            self._used_before = cuda_bytes_in_use(self._device)
        self.grammars = GrammarLibrary(checkpoint, mesh.tp.rank)
        self._kv_dtype = kv_dtype(config.cache, compute_dtype(config))
        if config.observability.torch_profiler_dir is not None:
            directory, model = config.observability.torch_profiler_dir, config.model.model
            self.traces = TraceRecorder(directory, model, mesh.tp.rank, self._device)

    def load(self) -> Loaded:
        """Build the model, load its weights and measure the memory of the largest step.

        Raises ValueError for a model that is not supported, MemoryError if the GPU is too small.
        """
        with _explain_out_of_memory(self._device, "the weights and one step", _SMALLER_STEPS):
            return self._load()

    def allocate(self, allocate: AllocateKV) -> None:
        """Allocate the KV cache, capture graphs and run warm-up steps.

        Raises MemoryError if the GPU is too small.
        """
        with _explain_out_of_memory(self._device, "the KV cache and graphs beside the model", _SMALLER_CACHE):
            self._allocate(allocate)

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. With several ranks, raises MemoryError if the device lacks memory."""
        with _explain_out_of_memory(self._device, "a step", _SMALLER_CACHE):
            if self.traces is None or not self.traces.recording:
                return self._runner.launch(batch)
            with self.traces.step(self._runner.label(batch)):
                return self._runner.launch(batch)

    def expert_load(self) -> ExpertLoad | None:
        """The last window's load of the experts, once, on the first of the ranks that share them."""
        balancer = self._balancer
        if balancer is None or self._mesh.ep.rank or balancer.imbalance is self._reported:
            return None
        self._reported = balancer.imbalance
        assert self._reported is not None, "it is another than before"
        return ExpertLoad(self._reported, balancer.moved)

    def idle_step(self, leaving: bool = False) -> Agreed:
        """Take part in a step of engines in lockstep without a batch; `leaving`: none will come any more.

        Launches a dummy step, unless no rank has a step or this rank's batch is on its way.
        """
        assert self._agreement is not None, "the engines are in lockstep"
        agreed = self._agreement.without_step(leaving)
        if agreed.shape is not None and not agreed.has_batch:
            with _explain_out_of_memory(self._device, "a step", _SMALLER_CACHE):
                if self.traces is None or not self.traces.recording:
                    self._runner.dummy_step(agreed.shape)
                else:
                    with self.traces.step("dummy"):
                        self._runner.dummy_step(agreed.shape)
        return agreed

    def _load(self) -> Loaded:
        resolved = resolve_ops(self._device, self._config, self._checkpoint)
        if self._tp.rank == 0:
            get_logger().info("ops on %s: %s", self._device, backend.summary(resolved))
        for line in backend.warnings(self._device):
            get_logger().warning("%s", line)
        if self._tp.size > 1:
            width = self._checkpoint.hf_config["hidden_size"]
            self._tp.open_peers(width, compute_dtype(self._config), self._device)
        self._model = self._build_model()
        if self._model.overlap_tokens:
            self._tp.open_copies()
        if self._tp.rank == 0 and (backends := attention_backends(self._model.kv_groups)):
            get_logger().info("attention backends: %s", backends)
        self._balancer = self._make_balancer()
        if self._device.type == "cuda":
            # Kernels with programmatic dependent launch may read weights before earlier kernels end.
            torch.cuda.synchronize(self._device)
        get_logger().info("weights on rank %d: %s", self._tp.rank, describe_weights(self._model))
        self._tune()
        self._compile()
        specs = rank_specs(self._config, self._model)
        return Loaded(self._tp.rank, specs, self._kv_bytes(), weight_bytes(self._model))

    def _allocate(self, allocate: AllocateKV) -> None:
        with self._tracing_captures():
            kv_layers = self._make_kv(allocate.num_blocks)
            inputs = self._make_inputs(allocate.max_model_len, allocate.num_blocks)
            self._runner = self._make_runner(kv_layers, inputs, self._capture_sizes())
            if self._balancer is not None:
                self._runner.before_step = self._balancer.before_step
        sized = zip(self._model.kv_groups, allocate.num_blocks, strict=True)
        num_blocks = min(blocks for group, blocks in sized if not isinstance(group, StateGroup))
        capacity = num_blocks * self._config.block_tokens
        self._warm_up(min(capacity, allocate.max_model_len, _WARM_TOKENS + _WARM_DECODES))
        if self.traces is not None:
            self.traces.prepare()
        if self._device.type != "cpu" and self._tp.rank == 0:
            names = ", ".join(backend.ran_in_torch()) or "none"
            get_logger().info("ops on %s that fell back to torch: %s", self._device, names)

    def _build_model(self) -> CausalLM:
        model = build_rank(self._config, self._checkpoint, self._mesh, self._dispatch)
        for line in describe_schemes(model) if self._tp.rank == 0 else ():
            get_logger().info("quantization: %s", line)
        if self._config.model.load_dummy:
            load_dummy(model, lambda done, total: self._progress("Filling weights", done, total))
        else:
            self._load_weights(model)
        if self._marked:
            mark_modules(model)
        return model

    def _make_balancer(self) -> ExpertBalancer | None:
        config = eplb_config(self._config.parallel)
        if config is None:
            return None
        balancer = ExpertBalancer(self._model, self._mesh.ep, config)
        if self._config.model.load_dummy:
            balancer.copy_replicas()
        return balancer

    @property
    def _marked(self) -> bool:
        """Whether traces contain module names."""
        return self._config.observability.mark_trace and self.traces is not None

    def _load_weights(self, model: CausalLM) -> None:
        directory, changes = Path(self._checkpoint.directory), self._config.model.hf_overrides
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

    def _tune(self) -> None:
        """Tune kernels; before memory is measured, so that its temporary memory is free again."""
        layers = (layer for layer in self._model.modules() if isinstance(layer, Linear))
        weights = [layer.weight for layer in layers]
        backend.tune(self._device, weights, Path(envs.ATOM_CACHE_DIR), self._progress)

    def _compile(self) -> None:
        """Replace the forward pass by a compiled one, where --level says so."""
        level = self._config.device.level
        if level not in COMPILERS:
            return
        from workers.graphs.compile_cache import compile_forward, directory_of  # imports torch's compiler

        blocks = [1] * len(self._model.kv_groups)
        kv_layers = self._make_kv(blocks)
        inputs = self._make_inputs(self._longest_sequence(), blocks)

        def step(tokens: int) -> tuple[torch.Tensor, torch.Tensor, ForwardContext]:
            ids_T = torch.zeros(tokens, dtype=torch.int64, device=self._device)
            groups = pad_groups(inputs.empty_step().groups, tokens, 1)
            return ids_T, torch.zeros_like(ids_T), ForwardContext(kv_layers, groups)

        self._progress("Compiling", 0, 1)
        directory = directory_of(Path(envs.ATOM_CACHE_DIR), self._config, self._checkpoint, self._device)
        with torch.inference_mode():
            compiled = compile_forward(self._model, step, level, directory)
        self._model.forward = compiled  # type: ignore[method-assign]
        self._progress("Compiling", 1, 1)
        get_logger().info("level %d: %s compiled %d pieces", level, COMPILERS[level], compiled.num_pieces)

    def _make_kv(self, num_blocks: Sequence[int]) -> list[CacheLayer]:
        block_size = self._config.cache.block_size
        return allocate_kv(self._model.kv_groups, num_blocks, block_size, self._kv_dtype, self._device)

    def _make_inputs(self, max_model_len: int, num_blocks: Sequence[int]) -> InputBatch:
        """The empty batch; `num_blocks` of each KV group."""
        max_rows = self._config.scheduler.max_num_seqs
        assert max_rows is not None, "max_num_seqs is resolved before any worker starts"
        drafts = self._config.speculative.num_speculative_tokens
        limits = BatchLimits(max_rows, max_model_len, self._config.block_tokens, drafts)
        tables = [_rows_of(group, limits) for group in self._model.kv_groups]
        split_tokens = BATCH_INVARIANT_SPLIT if self._config.device.batch_invariant else 0
        method = method_of(self._config.speculative, self._model.kv_groups)
        proposer = None if method is None else method.proposer(limits, tables, num_blocks, self._device)
        return InputBatch(limits, tables, self._device, split_tokens, proposer)

    def _make_runner(
        self, kv_layers: list[CacheLayer], inputs: InputBatch, capture_sizes: list[int]
    ) -> ModelRunner:
        memory = MemoryGuard(self._device, self._mesh.ep.size)
        sampler = Sampler(inputs.limits, self._checkpoint.vocab_size, self._device, memory, self.grammars)
        graphs = self._capture(kv_layers, inputs, capture_sizes) if capture_sizes else None
        if self._mesh.host is not None:
            self._agreement = Agreement(self._mesh, self._dispatch, graphs.sizes if graphs else GraphSizes())
        recorder, agree = event_recorder(self._device), self._agreement or no_agreement
        return ModelRunner(self._model, kv_layers, inputs, sampler, memory, recorder, graphs, agree)

    def _capture(self, kv_layers: list[CacheLayer], inputs: InputBatch, sizes: list[int]) -> Graphs:
        """Capture graphs of steps; `sizes` are rows of decode steps."""
        mode = self._config.device.cudagraph_mode
        settings = GraphSettings(mode, sizes, self._most_tokens, self._marked)

        def progress(done: int, total: int) -> None:
            self._progress("Capturing graphs", done, total)

        with self._equal_tokens(), _explain_out_of_memory(self._device, "graphs", _SMALLER_CACHE):
            return capture_graphs(settings, self._model, kv_layers, inputs, self._device, progress)

    @contextlib.contextmanager
    def _equal_tokens(self) -> Iterator[None]:
        """Forward passes have the same number of tokens on every rank, as captured ones do."""
        ranks = self._mesh.dp.size

        def plan(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._dispatch.plan([len(inputs[0])] * ranks)

        hook = self._model.register_forward_pre_hook(plan)
        try:
            yield
        finally:
            hook.remove()

    def _tracing_captures(self) -> contextlib.AbstractContextManager[None]:
        """Trace the captures: the replay of a graph does not name the modules of its kernels."""
        if self.traces is None or not self._marked or not self._capture_sizes():
            return contextlib.nullcontext()
        return self.traces.capture()

    def _capture_sizes(self) -> list[int]:
        """Rows of the decode steps to capture; empty without graphs."""
        device, max_rows = self._config.device, self._config.scheduler.max_num_seqs
        assert max_rows is not None and device.cudagraph_capture_sizes is not None
        sizes: list[int] = msgspec.json.decode(device.cudagraph_capture_sizes, type=list[int])
        return sorted({min(size, max_rows) for size in sizes})

    def _warm_up(self, tokens: int) -> None:
        """Run a prompt and its decode steps: compiles kernels and touches memory before the first request."""
        prompt = max(tokens - _WARM_DECODES, 1)
        decodes, drafts = tokens - prompt, self._config.speculative.num_speculative_tokens
        self._progress("Warming up", 0, 1 + decodes)
        _run(self._runner, self._warm_up_batch(prompt, tokens))
        for done in range(1, 1 + decodes):
            self._progress("Warming up", done, 1 + decodes)
            _run(self._runner, ScheduledBatch(-1, [0], num_drafts=drafts))
        while self._agreement is not None and self.idle_step().shape is not None:
            pass  # the others still warm up
        self._progress("Warming up", 1 + decodes, 1 + decodes)

    def _warm_up_batch(self, prompt: int, reserved: int) -> ScheduledBatch:
        """A step that prefills a prompt, with blocks for `reserved` tokens."""
        blocks = list(range(-(-reserved // self._config.block_tokens)))
        groups = self._model.kv_groups
        block_ids = [[0] if isinstance(group, StateGroup) else blocks for group in groups]
        row = NewRow(0, prompt, 0, block_ids, _GREEDY, prompt)
        return ScheduledBatch(-1, [0], [prompt], [row], token_ids=pack_ids([0] * prompt))

    def _kv_bytes(self) -> int:
        if self._device.type == "cpu":
            workers = self._config.parallel.workers_per_node
            return cpu_kv_bytes(self._config.cache, workers)
        return cuda_kv_bytes(self._config.cache, self._device, self._peak_bytes(), self._used_before)

    def _peak_bytes(self) -> int:
        """Peak memory that torch allocates on this GPU without KV: in the largest steps, and for graphs."""
        scheduler = self._config.scheduler
        assert scheduler.max_num_seqs is not None
        shapes = largest_steps(self._most_tokens, scheduler.max_num_seqs, self._longest_sequence())
        return max(map(self._peak_of, shapes)) + self._graph_bytes()

    @property
    def _most_tokens(self) -> int:
        """Most tokens of a step."""
        most = self._config.scheduler.max_num_batched_tokens
        assert most is not None, "max_num_batched_tokens is resolved before any worker starts"
        return most

    def _longest_sequence(self) -> int:
        return longest_sequence(self._config, self._checkpoint)

    def _peak_of(self, counts: list[int]) -> int:
        """Peak memory of a step that computes `counts[i]` tokens of row i."""
        groups, block_size = self._model.kv_groups, self._config.block_tokens
        longest = self._longest_sequence()
        batch = profile_batch(counts, groups, block_size, self._checkpoint.vocab_size, longest)
        before = torch.cuda.memory_allocated(self._device)
        blocks = num_blocks(counts, groups, block_size)
        kv_layers = self._make_kv(blocks)
        kv_bytes = torch.cuda.memory_allocated(self._device) - before
        runner = self._make_runner(kv_layers, self._make_inputs(longest, blocks), [])
        torch.cuda.reset_peak_memory_stats(self._device)
        _run(runner, batch)
        if drafts := self._config.speculative.num_speculative_tokens:
            rows = max(self._most_tokens // (1 + drafts), 1)
            _run(runner, ScheduledBatch(-1, batch.rows[:rows], num_drafts=drafts))
        peak = torch.cuda.max_memory_allocated(self._device) - kv_bytes
        del runner, kv_layers
        torch.cuda.empty_cache()
        return peak

    def _graph_bytes(self) -> int:
        """Memory of the captured graphs: smaller ones reuse the memory of the largest."""
        sizes = self._capture_sizes()
        if not sizes:
            return 0
        blocks = [1] * len(self._model.kv_groups)
        kv_layers = self._make_kv(blocks)
        inputs = self._make_inputs(self._longest_sequence(), blocks)
        before = torch.cuda.memory_reserved(self._device)
        graphs = self._capture(kv_layers, inputs, sizes[-1:])
        graph_bytes = torch.cuda.memory_reserved(self._device) - before
        del graphs, inputs, kv_layers
        torch.cuda.empty_cache()
        return graph_bytes
