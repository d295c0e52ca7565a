"""Kernels and tiles of `experts`, by the shape of the layer and the number of tokens.

Here are the rules for layers that were not measured; `plans.shipped` has the measured ones.
"""

from typing import Literal

import msgspec


class VectorTile(msgspec.Struct, frozen=True):
    """A program of a kernel of single tokens."""

    rows: int
    """Weight rows (of the gate and as many of up)."""
    columns: int
    """Weight columns of one iteration (of plain weights: of each of the token's experts; of 4 bits: 128)."""
    warps: int
    stages: int = 1
    """Iterations whose loads are in flight."""


class VectorPlan(msgspec.Struct, frozen=True, tag="vectors"):
    """Each token on its own."""

    tokens: int
    """Most tokens."""
    gate_up: VectorTile
    down: VectorTile


class GroupedTile(msgspec.Struct, frozen=True):
    """A program of the grouped GEMM."""

    rows: int
    """Weight rows (of the gate and as many of up)."""
    columns: int
    """Weight columns of one iteration; of 4-bit weights always 128."""
    warps: int
    stages: int
    """Iterations whose loads are in flight."""
    persistent: bool = False
    """One program on each SM computes many tiles, and loads for the next one before it stores."""


class GroupedPlan(msgspec.Struct, frozen=True, tag="grouped"):
    """Blocks of pairs of one expert."""

    tokens: int
    """Most tokens."""
    block: int
    """Most pairs of a block: the tile's other side."""
    gate_up: GroupedTile
    down: GroupedTile

    @property
    def swapped(self) -> bool:
        """Whether the weight is the first operand: it has more rows than tokens, and WGMMA needs 64."""
        return self.block < 64


class WgmmaPlan(msgspec.Struct, frozen=True, tag="wgmma"):
    """Blocks of pairs of one expert, for 4-bit weights on Hopper."""

    tokens: int
    """Most tokens."""
    block: int
    """Most pairs of a block, a power of two of at least 8."""
    short: int
    """Blocks of no more pairs multiply fewer columns; a power of two of at least 8."""
    chunks: int
    """Chunks of 128 weight columns in a stage: 1 or 2."""
    registers: int
    """Most registers of a thread."""


class PersistentPlan(msgspec.Struct, frozen=True, tag="persistent"):
    """Blocks of 128 pairs of one expert, for 16-bit weights on Hopper: see `hopper_experts`.

    4-bit weights are decoded before. With so many tokens that costs less than decoding them in each block.
    """

    tokens: int
    """Most tokens."""


ExpertPlan = VectorPlan | GroupedPlan | WgmmaPlan | PersistentPlan
GluonPlans = tuple[type[WgmmaPlan | PersistentPlan], ...]
GLUON: GluonPlans = (WgmmaPlan, PersistentPlan)
"""Plans of kernels in Gluon, which need Hopper and do not take every weight."""
Format = Literal["plain", "block_fp8", "channel_fp8", "int8", "mxfp4", "int4"]
"""Format of the weights."""
Shape = tuple[int, int, int]
"""Experts, hidden size, features of an expert."""
Layer = tuple[Format, Shape]

MANY = 1 << 30
"""As `tokens` of the last plan."""

_FEW = VectorPlan(4, VectorTile(4, 512, 4, 3), VectorTile(4, 128, 4, 3))
_FEW_QUANTIZED = VectorPlan(4, VectorTile(8, 512, 4, 3), VectorTile(4, 128, 4, 3))
_FEW_4BIT = VectorPlan(4, VectorTile(16, 128, 2, 4), VectorTile(8, 128, 2, 4))

_LARGE_BLOCKS = GroupedPlan(MANY, 128, GroupedTile(128, 64, 8, 4), GroupedTile(128, 64, 4, 3))

# By pairs per expert on average: the most, and the plan.
_HOPPER = (
    (8, GroupedPlan(MANY, 16, GroupedTile(64, 128, 4, 3), GroupedTile(64, 128, 4, 3))),
    (24, GroupedPlan(MANY, 32, GroupedTile(64, 64, 4, 3), GroupedTile(128, 64, 4, 5))),
    (48, GroupedPlan(MANY, 64, GroupedTile(64, 64, 4, 3), GroupedTile(128, 64, 4, 3))),
    (200, _LARGE_BLOCKS),
    (MANY, PersistentPlan(MANY)),
    (MANY, _LARGE_BLOCKS),
)
# A tile of block-scaled FP8 has at most the rows of a block.
_HOPPER_8BIT = (
    (8, GroupedPlan(MANY, 16, GroupedTile(64, 128, 4, 3), GroupedTile(128, 128, 4, 3))),
    (32, GroupedPlan(MANY, 32, GroupedTile(128, 128, 4, 3), GroupedTile(128, 128, 4, 3))),
    (96, GroupedPlan(MANY, 64, GroupedTile(64, 128, 4, 4), GroupedTile(128, 128, 4, 4))),
    (MANY, GroupedPlan(MANY, 128, GroupedTile(128, 128, 8, 3, True), GroupedTile(128, 128, 8, 3, True))),
)
_HOPPER_4BIT = (
    (4, WgmmaPlan(MANY, 8, 8, 2, 128)),
    (9, WgmmaPlan(MANY, 16, 8, 2, 128)),
    (24, WgmmaPlan(MANY, 32, 16, 2, 168)),
    (900, WgmmaPlan(MANY, 64, 32, 1, 168)),
    (MANY, PersistentPlan(MANY)),
    (MANY, WgmmaPlan(MANY, 64, 32, 1, 168)),
)
_FEWEST_WGMMA = 3
"""Tokens; with fewer, each on its own."""
# For 4-bit weights or activations that `expert_wgmma` does not take. Of 4 warps: see `four_bit_linear`.
_HOPPER_4BIT_ANY = (
    (8, GroupedPlan(MANY, 16, GroupedTile(64, 128, 4, 3), GroupedTile(128, 128, 4, 3))),
    (16, GroupedPlan(MANY, 32, GroupedTile(64, 128, 4, 3), GroupedTile(128, 128, 4, 3))),
    (MANY, GroupedPlan(MANY, 64, GroupedTile(64, 128, 4, 3), GroupedTile(128, 128, 4, 4))),
)
_ANYWHERE = (
    (8, GroupedPlan(MANY, 16, GroupedTile(32, 64, 4, 2), GroupedTile(64, 64, 4, 2))),
    (32, GroupedPlan(MANY, 32, GroupedTile(32, 64, 4, 2), GroupedTile(64, 64, 4, 2))),
    (MANY, GroupedPlan(MANY, 64, GroupedTile(32, 64, 4, 2), GroupedTile(64, 64, 4, 2))),
)
INTERPRETED = (
    VectorPlan(1, VectorTile(4, 64, 4), VectorTile(8, 32, 4)),
    GroupedPlan(10, 16, GroupedTile(32, 64, 4, 2), GroupedTile(64, 32, 4, 2)),
    GroupedPlan(MANY, 64, GroupedTile(32, 32, 4, 2), GroupedTile(64, 32, 4, 2, persistent=True)),
)
INTERPRETED_QUANTIZED = (
    VectorPlan(1, VectorTile(16, 128, 4), VectorTile(32, 256, 4)),
    GroupedPlan(MANY, 16, GroupedTile(64, 128, 4, 2), GroupedTile(64, 128, 4, 2)),
)
BATCH_INVARIANT = GroupedPlan(MANY, 64, GroupedTile(64, 64, 4, 2), GroupedTile(64, 64, 4, 2))
"""One plan for any number of tokens."""


def few(format: Format) -> VectorPlan:
    """The plan of single tokens for a layer that was not measured."""
    if format == "plain":
        return _FEW
    return _FEW_4BIT if format in ("mxfp4", "int4") else _FEW_QUANTIZED


def default_plan(
    layer: Layer, tokens: int, chosen: int, hopper: bool, gluon: GluonPlans = GLUON
) -> ExpertPlan:
    """The plan of a layer that was not measured; each token has `chosen` experts.

    `gluon`: those of `GLUON` that fit the weights and the activations.
    """
    format, shape = layer
    plan = few(format)
    plans = [(most, plan) for most, plan in _plans(format, hopper) if _fits(plan, gluon)]
    most = _FEWEST_WGMMA - 1 if isinstance(plans[0][1], WgmmaPlan) else plan.tokens
    if tokens <= most and tokens * chosen <= 4 * shape[0]:
        return plan
    per_expert = tokens * chosen / shape[0]
    return next(plan for most, plan in plans if per_expert <= most)


def _plans(format: Format, hopper: bool) -> tuple[tuple[int, ExpertPlan], ...]:
    if not hopper:
        return _ANYWHERE
    if format == "plain":
        return _HOPPER
    return _HOPPER_4BIT + _HOPPER_4BIT_ANY if format in ("mxfp4", "int4") else _HOPPER_8BIT


def tuned_plan(plans: tuple[ExpertPlan, ...], tokens: int, gluon: GluonPlans = GLUON) -> ExpertPlan | None:
    """The first plan for so many tokens; None if there is none. `gluon`: as in `default_plan`."""
    return next((plan for plan in plans if tokens <= plan.tokens and _fits(plan, gluon)), None)


def _fits(plan: ExpertPlan, gluon: GluonPlans) -> bool:
    return isinstance(plan, gluon) or not isinstance(plan, GLUON)
