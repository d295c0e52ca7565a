"""What each --cudagraph-mode captures.

| mode               | decode steps | prefill and mixed steps |
|--------------------|--------------|-------------------------|
| FULL               | whole        | whole                   |
| FULL_AND_PIECEWISE | whole        | in pieces               |
| FULL_DECODE_ONLY   | whole        | eager                   |
| PIECEWISE          | in pieces    | in pieces               |
| NONE               | eager        | eager                   |

Whole steps are fastest: attention is in the graph, with kernels that suit any row. In pieces attention
chooses its kernels by the step. A CPU has FULL_DECODE_ONLY, with recordings in place of graphs; where rows
have drafts, each another number, it also records small steps of any rows. A GPU has FULL_DECODE_ONLY in place
of FULL for recurrent states with drafts: their rows compute their tokens one after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from atom.shared.config.device import GraphMode
from atom.shared.utils.logger import describe
from atom_ops import NoHostRowsError
from workers.batch.input_batch import InputBatch
from workers.graphs.call_recorder import CallRecorder, NotRecordableError
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.graph_recorder import GraphRecorder
from workers.graphs.piecewise_graphs import PiecewiseGraphs
from workers.graphs.piecewise_recorder import PiecewiseRecorder
from workers.graphs.prompt_graphs import PROMPT_SIZES, PromptGraphs
from workers.graphs.trace_ranges import RangeRecorder
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer
from workers.model_runner import Graphs

_RECORDED_TOKENS = (*range(2, 9), *range(10, 17, 2), *range(20, 33, 4))
"""Tokens of the steps with drafts that a CPU records. With more tokens, Python takes little of a step."""


@dataclass(frozen=True)
class GraphSettings:
    """What to capture; without `rows` nothing."""

    mode: GraphMode
    rows: Sequence[int]
    """Rows of the decode steps to capture, ascending."""
    most_tokens: int
    """Most tokens of a step."""
    drafts: Sequence[int] = (0,)
    """Drafts of each row of decode steps to capture."""
    trace_ranges: bool = False
    """Whether captures and replays are named ranges in traces."""
    run_always: bool = True
    """Whether each step runs before its capture, also if all its kernels are loaded."""

    largest_alone: bool = False
    """Whether only the largest step of each kind is captured: smaller ones reuse its memory."""

    def largest(self) -> "GraphSettings":
        """These settings for the largest step of each kind."""
        return replace(self, rows=self.rows[-1:], largest_alone=True)

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of the prefill and mixed steps to capture, ascending."""
        sizes = [size for size in PROMPT_SIZES if size <= self.most_tokens] or [self.most_tokens]
        return sizes[-1:] if self.largest_alone else sizes

    @property
    def recorded_tokens(self) -> list[int]:
        """Tokens of the steps with drafts to record, ascending."""
        sizes = [size for size in _RECORDED_TOKENS if size <= self.most_tokens]
        return sizes[-1:] if self.largest_alone else sizes

    def piecewise_tokens(self, tokens_per_row: int) -> list[int]:
        """Tokens of the steps to capture in pieces, ascending."""
        if self.mode != "PIECEWISE":
            return self.prompt_tokens
        decodes = (rows * tokens_per_row for rows in self.rows)
        return sorted({*self.prompt_tokens, *(size for size in decodes if size <= self.most_tokens)})


def capture_graphs(
    settings: GraphSettings,
    model: CausalLM,
    kv_layers: Sequence[CacheLayer],
    inputs: InputBatch,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Graphs:
    """Capture the graphs of one model; `progress` is called with (done, total).

    Those that a CPU cannot record are left out, with a line in the log. Raises torch.OutOfMemoryError.
    """
    if not settings.rows or settings.mode == "NONE":
        return Graphs()
    recorder = CallRecorder() if device.type == "cpu" else GraphRecorder(settings.run_always)
    record = RangeRecorder(recorder) if settings.trace_ranges else recorder
    decode: list[DecodeGraphs] = []
    prompts: PromptGraphs | PiecewiseGraphs | None = None
    if settings.mode != "PIECEWISE":
        decode = [
            DecodeGraphs(model, kv_layers, inputs, settings.rows, record, device, num_drafts)
            for num_drafts in settings.drafts
        ]
    drafts_have_states = inputs.speculation is not None and inputs.has_states
    if settings.mode == "FULL" and not drafts_have_states:
        prompts = PromptGraphs(model, kv_layers, inputs, settings.prompt_tokens, record, device)
    elif settings.mode in ("FULL_AND_PIECEWISE", "PIECEWISE"):
        sizes = settings.piecewise_tokens(1 + inputs.limits.num_drafts)
        prompts = PiecewiseGraphs(model, kv_layers, inputs, sizes, PiecewiseRecorder(recorder), device)
    elif inputs.speculation is not None and inputs.speculation.exact and not drafts_have_states:
        sizes = settings.recorded_tokens
        prompts = PromptGraphs(model, kv_layers, inputs, sizes, record, device, most_rows_alone=True)
    total = sum(len(graphs.sizes) for graphs in decode) + (len(prompts.token_sizes) if prompts else 0)
    done = 0
    progress(done, total)

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    def captured(graphs: DecodeGraphs | PromptGraphs | PiecewiseGraphs, kind: str) -> bool:
        try:
            graphs.capture(one_more)
        except (NotRecordableError, NoHostRowsError) as error:
            if device.type != "cpu":
                raise
            describe(
                "%s are not recorded: %s; Python runs their operators one by one, which changes no "
                "output, and takes longer for a small model",
                kind,
                error,
            )
            return False
        return True

    if prompts is not None and not captured(prompts, "steps with drafts"):
        prompts = None
    decode = [graphs for graphs in decode if captured(graphs, "decode steps")]
    if done < total:
        progress(total, total)
    return Graphs(decode, prompts)
