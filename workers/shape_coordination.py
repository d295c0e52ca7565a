"""What the ranks of engines in lockstep agree on before each step: who has one, and its shape.

    rank 0   STEP, 8 tokens  ─┐              ┌─▶ launches its batch
    rank 1   IDLE            ─┤  exchange    ├─▶ launches a dummy step, for the collectives of its experts
    rank 2   STEP, 5 tokens  ─┘              └─▶ launches its batch

All ranks of the mesh exchange, since the tensor-parallel ranks of an engine get its batches at different
moments: if one has a batch, it is on its way to the others, which wait for it. When no rank has a step the
wave of steps ends, and the ranks sleep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from parallel.expert import ExpertDispatch
from parallel.host_group import HostGroup
from parallel.mesh import Mesh
from workers.batch.step_shape import GraphSizes, StepMode, StepShape
from workers.spec_decode.draft_passes import DraftPasses

_DUMMY = StepShape(StepMode.EAGER, 1, 1)


class _State(IntEnum):
    IDLE = 0
    STEP = 1
    LEAVING = 2


@dataclass(frozen=True, slots=True)
class CoordinatedStep:
    """The next step of a rank."""

    shape: StepShape | None = None
    """None: no rank has a step."""
    has_batch: bool = False
    """Whether this rank's engine has sent a batch for it; else it is a dummy step."""
    all_leave: bool = False
    """Whether no rank will have a step any more."""


class ShapeCoordinator:
    """Maps the shape that this rank planned to the one that it launches; a `CoordinateShape`.

    Also tells the dispatch the tokens of every rank. Captured steps have the same shape on all ranks; in an
    eager one each rank computes its own tokens, and one without a batch a single token of padding.
    """

    def __init__(
        self,
        mesh: Mesh,
        dispatch: ExpertDispatch,
        sizes: GraphSizes,
        passes: DraftPasses | None = None,
    ):
        """`sizes` are those of the runner's graphs, the same on all ranks.

        `passes`: those of a model that drafts, on which the ranks agree as well.
        """
        assert mesh.host is not None, "ranks that agree have a host group"
        self._host: HostGroup = mesh.host
        self._tp = mesh.tp.size
        self._dp = mesh.dp
        self._dispatch = dispatch
        self._sizes = sizes
        self._passes = passes
        self._early: StepShape | None = None

    def __call__(self, planned: StepShape) -> StepShape:
        # The batch of a step that was coordinated while it was on its way: exchange nothing again.
        shape = self._early
        self._early = None
        if shape is None:
            shape = self._exchange(_State.STEP, planned).shape
            assert shape is not None, "this rank has a step"
        return shape

    def without_step(self, leaving: bool = False) -> CoordinatedStep:
        """Take part in a step without a batch of this rank; `leaving`: there will be none any more.

        If another rank of the engine has a batch, this one's arrives soon, and its shape is agreed on.
        """
        agreed = self._exchange(_State.LEAVING if leaving else _State.IDLE, _DUMMY)
        if agreed.has_batch:
            self._early = agreed.shape
        return agreed

    def _exchange(self, state: _State, planned: StepShape) -> CoordinatedStep:
        drafts = self._passes.planned if self._passes is not None else ()
        numbers = (state, planned.mode, planned.padded_tokens, planned.padded_rows, planned.tokens_per_row)
        ranks = self._host.all_gather((*numbers, *drafts))
        engines = [ranks[first : first + self._tp] for first in range(0, len(ranks), self._tp)]
        plans = [_plan_of(engine) for engine in engines]
        steps = [plan for plan in plans if plan is not None]
        if not steps:
            return CoordinatedStep(all_leave=all(rank[0] == _State.LEAVING for rank in ranks))
        if self._passes is not None:
            self._passes.agree([_drafts_of(engine) for engine in engines])
        covering = self._sizes.covering(steps)
        shapes = self._shapes(plans, covering)
        tokens = [shape.padded_tokens for shape in shapes]
        self._dispatch.plan(tokens, eager=covering.mode is StepMode.EAGER)
        return CoordinatedStep(shapes[self._dp.rank], has_batch=plans[self._dp.rank] is not None)

    def _shapes(self, plans: Sequence[StepShape | None], covering: StepShape) -> list[StepShape]:
        """What each data-parallel rank launches."""
        if covering.mode is not StepMode.EAGER:
            return [covering] * len(plans)
        return [replace(plan or _DUMMY, mode=StepMode.EAGER, tokens_per_row=0) for plan in plans]


def _plan_of(ranks: Sequence[Sequence[int]]) -> StepShape | None:
    """The plan of an engine, from what its tensor-parallel ranks have sent; None without a step."""
    for state, mode, tokens, rows, tokens_per_row, *_ in ranks:
        if state == _State.STEP:
            return StepShape(StepMode(mode), tokens, rows, tokens_per_row)
    return None


def _drafts_of(ranks: Sequence[Sequence[int]]) -> tuple[int, int]:
    """`DraftPasses.planned` of an engine, from what its tensor-parallel ranks have sent."""
    for state, *_, num_rows, num_drafts in ranks:
        if state == _State.STEP:
            return num_rows, num_drafts
    return 0, 0
