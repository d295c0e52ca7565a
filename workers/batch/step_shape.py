"""The shape of a step: how it is launched and how far it is padded, decided on the host before the launch.

    plan(batch) ──▶ coordinate(shape) ──▶ launch
    this rank       all ranks that step together

With expert parallelism over data-parallel ranks every rank must launch the same shape, though each has
requests of its own; one without requests launches only padding (`ModelRunner.dummy_step`). The ranks of one
tensor-parallel group get the same message and plan the same shape from it without talking.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class StepMode(IntEnum):
    """How the forward pass is launched; each mode can also run what the modes before it can."""

    DECODE_GRAPH = 0
    """A captured decode step: every row computes the same number of tokens."""
    PROMPT_GRAPH = 1
    """A captured step of any rows."""
    EAGER = 2
    """Kernel by kernel."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The forward pass that a rank launches. Tokens and rows beyond the batch's are padding."""

    mode: StepMode
    padded_tokens: int
    padded_rows: int
    tokens_per_row: int = 0
    """Tokens of each row of a decode graph; 0 in other modes, where rows differ."""

    def require(self, least: "StepShape") -> None:
        """Raise ValueError unless a batch of shape `least` can be launched in this shape."""
        if (
            self.mode < least.mode
            or self.padded_tokens < least.padded_tokens
            or self.padded_rows < least.padded_rows
            or (self.mode is StepMode.DECODE_GRAPH and self.tokens_per_row != least.tokens_per_row)
        ):
            raise ValueError(f"the ranks agreed on {self}, which is too small for a batch that needs {least}")


CoordinateShape = Callable[[StepShape], StepShape]
"""Maps the shape that this rank planned to the one that all ranks launch. Called once for every step."""


def no_coordination(shape: StepShape) -> StepShape:
    """For ranks that launch steps independently of other ranks, or plan the same shape anyway."""
    return shape


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the captured graphs, ascending; empty without graphs. Plans shapes from them."""

    decode_rows: Sequence[int] = ()
    prompt_tokens: Sequence[int] = ()
    prompt_rows: Sequence[int] = ()
    widths: Sequence[int] = (1,)
    """Tokens of each row of the decode graphs: 1 + drafts, or 1, or either."""

    def plan(self, tokens: int, rows: int, tokens_per_row: int = 0, eager: bool = False) -> StepShape:
        """The shape of a step of `rows` rows with `tokens` tokens in all.

        `tokens_per_row`: if all rows decode and compute this many tokens each; else 0. `eager`: in no graph.
        """
        least = StepMode.EAGER if eager else StepMode.DECODE_GRAPH
        return self._smallest(least, tokens, rows, tokens_per_row)

    def covering(self, shapes: Iterable[StepShape]) -> StepShape:
        """The smallest shape in which each rank can launch its step, from the shapes that they planned.

        The same on every rank with the same graphs. An eager step makes all of them eager.
        """
        planned = list(shapes)
        uniform = {shape.tokens_per_row for shape in planned}
        return self._smallest(
            max(shape.mode for shape in planned),
            max(shape.padded_tokens for shape in planned),
            max(shape.padded_rows for shape in planned),
            uniform.pop() if len(uniform) == 1 else 0,
        )

    def check(self, shape: StepShape) -> None:
        """Raise ValueError unless steps of this shape can be launched: they have a token, and the graph."""
        if shape.padded_tokens < 1 or shape.padded_rows < 1:
            raise ValueError(f"a step computes at least one token of one row: {shape}")
        if shape.mode is StepMode.DECODE_GRAPH:
            captured = shape.tokens_per_row in self.widths and shape.padded_rows in self.decode_rows
            captured = captured and shape.padded_tokens == shape.padded_rows * shape.tokens_per_row
        else:
            captured = shape.padded_tokens in self.prompt_tokens and shape.padded_rows in self.prompt_rows
        if shape.mode is not StepMode.EAGER and not captured:
            raise ValueError(
                f"no graph of {shape} is captured; this rank has {self}. All ranks that agree on shapes need "
                "the same --cudagraph-capture-sizes, --max-num-seqs and --max-num-batched-tokens"
            )

    def _smallest(self, mode: StepMode, tokens: int, rows: int, tokens_per_row: int) -> StepShape:
        """The smallest shape of at least this mode, tokens and rows."""
        captured = tokens_per_row in self.widths and _fits(rows, self.decode_rows)
        if mode is StepMode.DECODE_GRAPH and captured:
            size = _next(self.decode_rows, rows)
            return StepShape(mode, size * tokens_per_row, size, tokens_per_row)
        if mode is not StepMode.EAGER and _fits(tokens, self.prompt_tokens) and _fits(rows, self.prompt_rows):
            padded_tokens = _next(self.prompt_tokens, tokens)
            return StepShape(StepMode.PROMPT_GRAPH, padded_tokens, _next(self.prompt_rows, rows))
        return StepShape(StepMode.EAGER, tokens, rows)


def _fits(number: int, sizes: Sequence[int]) -> bool:
    return bool(sizes) and number <= sizes[-1]


def _next(sizes: Sequence[int], least: int) -> int:
    return sizes[bisect_left(sizes, least)]
