"""Makes the runner of one rank's model with its KV cache, batch and graphs.

At start a worker makes small ones first, to measure the memory of the largest steps and of the graphs;
then it makes those that serve.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS
from atom.shared.config.engine import EngineConfig
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import get_logger
from atom_ops import BATCH_INVARIANT_SPLIT, backend
from parallel.expert import ExpertDispatch
from parallel.mesh import Mesh
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.group_rows import GroupRows
from workers.batch.image_rows import ImageRows
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import StateSlots
from workers.batch.step_shape import GraphSizes, no_coordination
from workers.grammar.library import GrammarLibrary
from workers.graphs.graph_modes import GraphSettings, capture_graphs
from workers.graphs.kernel_compilation import compile_kernels
from workers.layers.attention.cache_groups import CacheGroup, StateGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer
from workers.memory.kv_cache import allocate_kv, kv_dtype
from workers.memory.memory_guard import SMALLER_CACHE, MemoryGuard, explain_out_of_memory
from workers.model_runner import Graphs, ModelRunner
from workers.pending_step import event_recorder
from workers.rank_model import compute_dtype, drafts_with_experts, longest_sequence
from workers.sampling.sampler import Sampler
from workers.shape_coordination import ShapeCoordinator
from workers.spec_decode.draft_passes import DraftPasses
from workers.spec_decode.methods import method_of
from workers.vision.image_store import ImageStore

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


class RunnerBuilder:
    """What a runner is made from: configuration, model, mesh."""

    coordinator: ShapeCoordinator | None = None
    """That of the last runner; None unless the engines are in lockstep."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        mesh: Mesh,
        dispatch: ExpertDispatch,
        model: CausalLM,
        grammars: GrammarLibrary,
        progress: Progress,
    ):
        self.config = config
        self.checkpoint = checkpoint
        self.model = model
        self.device = mesh.device
        self.progress = progress
        self._mesh = mesh
        self._dispatch = dispatch
        self._grammars = grammars
        shares = config.parallel.lockstep and drafts_with_experts(model)
        self.images = _image_store(model, checkpoint, mesh.device)
        """None for a model without a vision tower."""
        self._passes = DraftPasses(dispatch) if shares else None

    @property
    def has_trace_ranges(self) -> bool:
        """Whether traces contain the names of modules and graphs."""
        observability = self.config.observability
        return observability.mark_trace and observability.torch_profiler_dir is not None

    @property
    def most_tokens(self) -> int:
        """Most tokens of a step."""
        most = self.config.scheduler.max_num_batched_tokens
        assert most is not None, "max_num_batched_tokens is resolved before any worker starts"
        return most

    @property
    def max_rows(self) -> int:
        """Rows of the batch."""
        rows = self.config.scheduler.max_num_seqs
        assert rows is not None, "max_num_seqs is resolved before any worker starts"
        return rows

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, before the size of the KV cache is known."""
        return longest_sequence(self.config, self.checkpoint)

    @property
    def num_drafts(self) -> int:
        """Drafts of each decoding row in a step."""
        return self.config.speculative.num_speculative_tokens

    @property
    def capture_sizes(self) -> list[int]:
        """Rows of the decode steps to capture, ascending; empty without graphs."""
        configured = self.config.device.cudagraph_capture_sizes
        assert configured is not None, "capture sizes are resolved before any worker starts"
        sizes: list[int] = msgspec.json.decode(configured, type=list[int])
        return sorted({min(size, self.max_rows) for size in sizes})

    def kv_layers(self, num_blocks: Sequence[int]) -> list[CacheLayer]:
        """Allocate the KV cache; `num_blocks` of each KV group."""
        dtype = kv_dtype(self.config.cache, compute_dtype(self.config))
        return allocate_kv(self.model.kv_groups, num_blocks, self.config.cache.block_size, dtype, self.device)

    def inputs(self, max_model_len: int, num_blocks: Sequence[int]) -> InputBatch:
        """The empty batch; `num_blocks` of each KV group."""
        limits = BatchLimits(self.max_rows, max_model_len, self.config.block_tokens, self.num_drafts)
        tables = [_rows_of(group, limits) for group in self.model.kv_groups]
        split_tokens = BATCH_INVARIANT_SPLIT if self.config.device.batch_invariant else 0
        method = method_of(self.config.speculative, self.model, self._passes)
        proposer = None if method is None else method.proposer(limits, tables, num_blocks, self.device)
        speculative = self.config.speculative
        batch = InputBatch(
            limits,
            tables,
            self.device,
            split_tokens,
            proposer,
            adaptive=speculative.spec_decode_adaptive,
            forced_length=speculative.forced_length,
        )
        if batch.speculation is not None:
            batch.speculation.timer.tp = self._mesh.tp
        if self.images is not None:
            batch.images = ImageRows(limits, self.device, self.images.features, self.images.settings)
            if proposer is not None:
                proposer.images = batch.images
        return batch

    def runner(
        self, kv_layers: list[CacheLayer], inputs: InputBatch, capture_sizes: list[int]
    ) -> ModelRunner:
        """A runner with graphs of decode steps of these rows; without sizes it has no graphs."""
        memory = MemoryGuard(self.device, self._mesh.ep.size)
        vocab_size = self.checkpoint.vocab_size
        tp = self._mesh.tp
        sampler = Sampler(inputs.limits, vocab_size, self.device, memory, self._grammars, tp)
        graphs = self.graphs(kv_layers, inputs, capture_sizes) if capture_sizes else None
        if self._mesh.host is not None:
            self.coordinator = ShapeCoordinator(
                self._mesh, self._dispatch, graphs.sizes if graphs else GraphSizes(), self._passes
            )
        recorder = event_recorder(self.device)
        coordinate = self.coordinator or no_coordination
        return ModelRunner(self.model, kv_layers, inputs, sampler, memory, recorder, graphs, coordinate)

    def graphs(
        self,
        kv_layers: list[CacheLayer],
        inputs: InputBatch,
        sizes: list[int],
        largest_alone: bool = False,
    ) -> Graphs:
        """Capture graphs of steps; `sizes` are rows of decode steps. `largest_alone`: one of each kind."""
        settings = self._graph_settings(inputs, sizes)
        if largest_alone:
            settings = settings.largest()

        def progress(done: int, total: int) -> None:
            self.progress("Capturing graphs", done, total)

        with self._equal_tokens(), explain_out_of_memory(self.device, "graphs", SMALLER_CACHE):
            return capture_graphs(settings, self.model, kv_layers, inputs, self.device, progress)

    def compile_kernels(self) -> None:
        """Compile the kernels of the steps to capture, on several threads, unless Triton has them."""
        sizes = self.capture_sizes
        captures = sizes and self.config.device.cudagraph_mode != "NONE"
        if not captures or not self._captures_before_running:
            return
        blocks = [1] * len(self.model.kv_groups)
        inputs = self.inputs(self.longest_sequence, blocks)
        self.progress("Compiling kernels", 0, 1)
        count = 0
        try:
            with self._equal_tokens():
                settings = self._graph_settings(inputs, sizes)
                count = compile_kernels(settings, self.model, self.kv_layers(blocks), inputs, self.device)
        except Exception as error:  # any, as of a step that cannot be captured whole: this saves time alone
            get_logger().info("kernels are compiled when they are first launched: %s", one_line(error))
        torch.cuda.empty_cache()
        self.progress("Compiling kernels", 1, 1)
        if count:
            get_logger().info("compiled %d Triton kernels: later starts find them in Triton's cache", count)

    @property
    def _captures_before_running(self) -> bool:
        """Whether a step can be captured that never ran.

        Not with several ranks: their collectives initialise in their first step, which cannot be captured.
        """
        several = self._mesh.tp.size * self._mesh.ep.size > 1
        return not several and backend.compiles_ahead(self.device)

    def _graph_settings(self, inputs: InputBatch, sizes: Sequence[int]) -> GraphSettings:
        return GraphSettings(
            self.config.device.cudagraph_mode,
            sizes,
            self.most_tokens,
            self._captured_drafts(inputs),
            self.has_trace_ranges,
            run_always=not self._captures_before_running or self.config.device.level in COMPILERS,
        )

    def _captured_drafts(self, inputs: InputBatch) -> list[int]:
        """The numbers of drafts of each row for which decode steps are captured.

        Where the host knows how many drafts each row has, rows differ; steps in which none has any do not.
        """
        if inputs.speculation is None or inputs.speculation.exact:
            return [0]
        return [self.num_drafts, 0] if self.config.adapts_draft_width else [self.num_drafts]

    @contextlib.contextmanager
    def _equal_tokens(self) -> Iterator[None]:
        """Forward passes have the same number of tokens on every rank, as captured ones do."""
        ranks = self._mesh.dp.size

        def plan(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._dispatch.plan([len(inputs[0])] * ranks)

        hook = self.model.register_forward_pre_hook(plan)
        try:
            yield
        finally:
            hook.remove()


def _image_store(model: CausalLM, checkpoint: Checkpoint, device: torch.device) -> ImageStore | None:
    if model.tower is None or checkpoint.images is None:
        return None
    return ImageStore(model.tower, checkpoint.images, checkpoint.hf_config["hidden_size"], device)


def _rows_of(group: CacheGroup, limits: BatchLimits) -> GroupRows:
    return StateSlots(limits) if isinstance(group, StateGroup) else BlockTable(limits)
