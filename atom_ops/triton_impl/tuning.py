"""Finds the fastest `linear` on a GPU that no table is part of the program for: once, kept on disk.

For each shape of weight and each class of tokens a few plans run against torch's own product:

  valid_plans      they compile for this GPU, and torch matches_torch with their results
  qualified  in a short race, not much slower than the fastest
  fastest    in a longer one; where that is torch, no plan is kept
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from atom.utils.logger import get_logger
from atom_ops.triton_impl.plan_file import PlanFile, Plans, Shape, Table
from atom_ops.triton_impl.tuned import LinearPlan

CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64))
"""At least and at most so many tokens share a plan: among them, company changes no bit of a token."""

# (rows, columns, warps, stages): what won for some shape on some GPU, and its neighbours for GPUs
# with less shared memory or slower memory.
_VECTOR = (
    (4, 512, 2, 4),
    (4, 1024, 4, 1),
    (4, 1024, 4, 4),
    (4, 2048, 8, 1),
    (8, 256, 2, 5),
    (8, 512, 4, 1),
    (8, 512, 4, 4),
    (8, 1024, 8, 3),
    (16, 256, 4, 1),
)
_MATRIX = {
    16: (
        (16, 256, 2, 3),
        (16, 512, 2, 4),
        (32, 128, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (128, 128, 8, 3),
    ),
    32: ((32, 128, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6)),
    64: ((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 5)),
}
_CUT = (64, 128, 4, 3)
"""The tile whose columns are also tried cut into split_k, where it alone leaves num_sms idle."""
_PARTS = (2, 4)
_FEW_PROGRAMS = 128

_SHORT, _LONG = 3, 15
_QUALIFIED = 1.15

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""
PHASE = "Tuning products"


class Bench(Protocol):
    """A GPU with the weights that are to be multiplied."""

    def valid_plans(self, plans: Sequence[LinearPlan], shape: Shape) -> list[LinearPlan]:
        """Those that run on this GPU and give what torch gives, within the op's tolerance."""

    def stopwatch(self, plan: LinearPlan | None, shape: Shape, tokens: int) -> Callable[[int], float]:
        """Seconds for a product, by torch where there is no plan: the median of so many rounds."""


def candidates(shape: Shape, least: int, tokens: int) -> list[LinearPlan]:
    """What is worth trying for a class of tokens."""
    outputs, inputs = shape

    def matrix(tile: tuple[int, int, int, int], split_k: int = 1) -> LinearPlan:
        return LinearPlan(tokens, False, *tile, split_k, least=least)

    plans = [LinearPlan(tokens, True, *tile, least=least) for tile in _VECTOR] if tokens == 1 else []
    tiles = _MATRIX[max(tokens, 16)]
    plans += map(matrix, tiles if tokens > 1 else tiles[1:3])
    if tokens > 1 and -(-outputs // _CUT[0]) < _FEW_PROGRAMS:
        plans += [matrix(_CUT, split_k) for split_k in _PARTS]
    return [plan for plan in plans if plan.rows <= outputs and plan.columns * plan.split_k < 2 * inputs]


def fastest(bench: Bench, shape: Shape, least: int, tokens: int) -> LinearPlan | None:
    """The plan that wins this class; None for torch, which also wins draws."""
    entrants = [None, *bench.valid_plans(candidates(shape, least, tokens), shape)]
    watches = [(plan, bench.stopwatch(plan, shape, tokens)) for plan in entrants]
    short = [watch(_SHORT) for _, watch in watches]
    limit = min(short) * _QUALIFIED
    qualified = [entry for entry, seconds in zip(watches, short, strict=True) if seconds <= limit]
    if len(qualified) == 1:
        return qualified[0][0]
    long = [watch(_LONG) for _, watch in qualified]
    return qualified[long.index(min(long))][0]


def by_shape(weights: Iterable[Tensor]) -> dict[Shape, list[Tensor]]:
    """The weights that plans can be for, each once: [O, I] -> weights."""
    found: dict[Shape, list[Tensor]] = {}
    seen = set()
    for weight in weights:
        plain = weight.dim() == 2 and weight.is_contiguous() and weight.is_floating_point()
        if plain and weight.element_size() == 2 and weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            found.setdefault((weight.shape[0], weight.shape[1]), []).append(weight)
    return found


def is_candidate(shape: Shape, plan: LinearPlan) -> bool:
    """Whether `tune` could have found the plan."""
    return (plan.least, plan.tokens) in CLASSES and plan in candidates(shape, plan.least, plan.tokens)


def tune(shapes: Sequence[Shape], bench: Bench, file: PlanFile, progress: Progress) -> Table:
    """Plans for the shapes, and for whatever else the file holds; what it lacks is measured.

    Whoever comes first measures for all workers on this machine; the others wait and read. Where
    the directory cannot be used, or the first one is stuck, there are no plans, and a line in the
    log says so.
    """

    def show(done: int, total: int) -> None:
        progress(PHASE, done, total)

    try:
        table = file.read()
        if all(shape in table for shape in shapes):
            return table
        with file.locked(show) as tell_others:
            return _measured(shapes, bench, file, (show, tell_others))
    except OSError as error:
        get_logger().warning(
            "products are torch's alone, since plans for them cannot be kept in %s: %s; "
            "mend that, or choose another place with ATOM_CACHE_DIR",
            file.path.parent,
            error,
        )
        return {}


def _measured(
    shapes: Sequence[Shape], bench: Bench, file: PlanFile, listeners: Sequence[Callable[[int, int], None]]
) -> Table:
    """The file's table with what it lacked; a shape that is done is kept, whatever happens to the next."""
    table = file.read()  # another worker may have filled it in the meantime
    missing = [shape for shape in shapes if shape not in table]
    if not missing:
        return table
    start, total = time.monotonic(), len(missing) * len(CLASSES)
    done = 0
    for shape in missing:
        plans: Plans = ()
        for least, tokens in CLASSES:
            for listener in listeners:
                listener(done, total)
            plan = fastest(bench, shape, least, tokens)
            plans += () if plan is None else (plan,)
            done += 1
        table[shape] = plans
        file.write(table)
    for listener in listeners:
        listener(total, total)
    taken = time.monotonic() - start
    get_logger().info("measured products of %d shapes in %.1f s: %s", len(missing), taken, file.path)
    return table
