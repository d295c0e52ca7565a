"""Autotunes `linear` for weight shapes without plans: once, with the results on disk.

For each weight shape and class of tokens, candidate plans are compared with torch's GEMM:

  valid      compiles for this GPU, and matches torch
  qualified  in a short measurement not much slower than the fastest
  fastest    in a longer measurement; if that is torch, there is no plan

Torch has no GEMM for quantized weights: among their plans the fastest wins.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from atom.shared.utils.logger import get_logger
from atom_ops.triton_impl.plans.linear_plans import LinearPlan, Plan, stream_k
from atom_ops.triton_impl.plans.plan_file import Key, PlanFile, Table
from atom_ops.triton_impl.plans.plan_format import Shape
from atom_ops.triton_impl.quantized import quantized_candidates
from atom_ops.triton_impl.quantized.quantized_call import Packed
from atom_ops.triton_impl.quantized.quantized_linear import readable
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan, key_of
from atom_ops.weights import Weight

CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64))
"""(fewest, most) tokens that share a plan; within a class a token's bits do not depend on the batch."""

# (rows, columns, warps, stages): the fastest tiles for some shape and GPU, and similar ones for GPUs
# with less shared memory or slower memory.
_GEMV_TILES = (
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
# (rows, warps, tiles) of the GEMV by whole rows, for weights with at most so many columns.
_ROW_TILES = ((2, 4, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (4, 4, 1), (4, 4, 3), (4, 8, 2), (8, 4, 2))
_MOST_ROW_COLUMNS = 8192
_GEMM_TILES = {
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
_SPLIT_K_TILE = (64, 128, 4, 3)
"""The tile that is also tried with split-K, where tiles are fewer than SMs."""
_SPLITS = (2, 4)
_STREAM_K = tuple(stream_k(128, 6, programs) for programs in (64, 96, 128))
"""For Hopper."""
_FEW_PROGRAMS = 128

_SHORT = 3
_LONG = 15
_QUALIFIED = 1.15

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""
PHASE = "Tuning GEMM kernels"


AnyPlan = Plan | QuantizedPlan


class Bench(Protocol):
    """Runs plans on a GPU with the model's weights."""

    def valid_plans(self, plans: Sequence[AnyPlan], shape: Key) -> list[AnyPlan]:
        """The plans that run on this GPU and match torch within the op's tolerance."""

    def stopwatch(self, plan: AnyPlan | None, shape: Key, tokens: int) -> Callable[[int], float]:
        """A function of the number of rounds that returns the median seconds of a GEMM; None is torch."""


def classes_of(shape: Key) -> tuple[tuple[int, int], ...]:
    """(fewest, most) tokens of each class."""
    return CLASSES if len(shape) == 2 else quantized_candidates.CLASSES


def candidates(shape: Key, least: int, tokens: int) -> list[AnyPlan]:
    """The plans to try for a class of tokens."""
    if len(shape) == 3:
        return list(quantized_candidates.candidates(shape, tokens))
    return [*_plain_candidates(shape, least, tokens)]


def _plain_candidates(shape: Shape, least: int, tokens: int) -> list[Plan]:
    outputs, inputs = shape

    def gemm(tile: tuple[int, int, int, int], split_k: int = 1) -> LinearPlan:
        return LinearPlan(tokens, False, *tile, split_k, least=least)

    plans = [LinearPlan(tokens, True, *tile, least=least) for tile in _GEMV_TILES] if tokens == 1 else []
    if tokens == 1 and inputs <= _MOST_ROW_COLUMNS:
        plans += [
            LinearPlan(1, True, rows, inputs, warps, 1, tiles=tiles) for rows, warps, tiles in _ROW_TILES
        ]
    hopper: list[Plan] = [plan for plan in _STREAM_K if (plan.least, plan.tokens) == (least, tokens)]
    tiles = _GEMM_TILES[max(tokens, 16)]
    plans += map(gemm, tiles if tokens > 1 else tiles[1:3])
    if tokens > 1 and -(-outputs // _SPLIT_K_TILE[0]) < _FEW_PROGRAMS:
        plans += [gemm(_SPLIT_K_TILE, split_k) for split_k in _SPLITS]
    fitting = (plan for plan in plans if plan.rows <= outputs and plan.columns * plan.split_k < 2 * inputs)
    return [*fitting, *hopper]


def fastest(bench: Bench, shape: Key, least: int, tokens: int) -> AnyPlan | None:
    """The fastest plan of this class; None for torch, also in a tie."""
    entrants: list[AnyPlan | None] = [*bench.valid_plans(candidates(shape, least, tokens), shape)]
    if len(shape) == 2:
        entrants.insert(0, None)
    if not entrants:
        return None
    watches = [(plan, bench.stopwatch(plan, shape, tokens)) for plan in entrants]
    short = [watch(_SHORT) for _, watch in watches]
    limit = min(short) * _QUALIFIED
    qualified = [entry for entry, seconds in zip(watches, short, strict=True) if seconds <= limit]
    if len(qualified) == 1:
        return qualified[0][0]
    long = [watch(_LONG) for _, watch in qualified]
    return qualified[long.index(min(long))][0]


def by_shape(weights: Iterable[Weight]) -> dict[Key, list[Tensor | Packed]]:
    """The weights that plans support, each once, by shape, or by format and shape."""
    found: dict[Key, list[Tensor | Packed]] = {}
    seen = set()
    for weight in weights:
        if readable(weight):
            found.setdefault(key_of(weight), []).append(weight)
        if not isinstance(weight, Tensor):
            continue
        plain = weight.dim() == 2 and weight.is_contiguous() and weight.is_floating_point()
        if plain and weight.element_size() == 2 and weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            found.setdefault((weight.shape[0], weight.shape[1]), []).append(weight)
    return found


def is_candidate(shape: Key, plan: AnyPlan) -> bool:
    """Whether `tune` would try this plan."""
    return any(
        tokens == plan.tokens and plan in candidates(shape, least, tokens)
        for least, tokens in classes_of(shape)
    )


def tune(shapes: Sequence[Key], bench: Bench, file: PlanFile, progress: Progress) -> Table:
    """Plans for these shapes and all others in the file; missing shapes are measured.

    One worker measures for all workers of this machine; the others wait for it and read the file.
    If the directory is not usable, or the wait times out, returns no plans and logs a warning.
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
            "GEMMs fall back to torch, because measured plans cannot be stored in %s: %s; "
            "fix that, or set ATOM_CACHE_DIR to another directory",
            file.path.parent,
            error,
        )
        return {}


def _measured(
    shapes: Sequence[Key], bench: Bench, file: PlanFile, listeners: Sequence[Callable[[int, int], None]]
) -> Table:
    """The file's table with all shapes; the file is written after each shape that was measured."""
    table = file.read()  # another worker may have filled it in the meantime
    missing = [shape for shape in shapes if shape not in table]
    if not missing:
        return table
    start = time.monotonic()
    total = sum(len(classes_of(shape)) for shape in missing)
    done = 0
    for shape in missing:
        plans: list[AnyPlan] = []
        for least, tokens in classes_of(shape):
            for listener in listeners:
                listener(done, total)
            plan = fastest(bench, shape, least, tokens)
            plans += [] if plan is None else [plan]
            done += 1
        table[shape] = tuple(plans)  # type: ignore[assignment]
        file.write(table)
    for listener in listeners:
        listener(total, total)
    taken = time.monotonic() - start
    get_logger().info("measured GEMM plans of %d shapes in %.1f s: %s", len(missing), taken, file.path)
    return table
