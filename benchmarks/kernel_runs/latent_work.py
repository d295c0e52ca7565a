"""The arguments of latent attention's ops; part of the table in `kernel_work`."""

from collections.abc import Callable
from typing import Any

from atom_ops import LatentLayer, LatentNorms, make_latent_layer
from benchmarks.kernel_runs.kernel_inputs import Inputs, Work, plan_of, slots_of
from benchmarks.kernel_runs.kernel_shapes import BLOCK_SIZE, LatentShape, ModelShape, StepShape

__all__ = ["LATENT_WORKS", "latent_gemms"]

_EPS = 1e-6
_RANKS = 8
"""Tensor-parallel size whose number of heads is measured besides all heads."""

Make = Callable[[Inputs], tuple[Any, ...]]


def latent_gemms(model: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the GEMMs around latent attention, by name; empty for other models."""
    shape = model.latent
    heads = model.heads
    if shape is None:
        return {}
    queries = heads * (shape.nope + shape.rope)
    row = shape.row
    out = {"o": (heads * shape.value, model.hidden)}
    if shape.query is None:
        return {"q_kv_a": (model.hidden, queries + row)} | out
    return {"qkv_a": (model.hidden, shape.query + row), "q_b": (shape.query, queries)} | out


def _each_count(
    model: ModelShape, work: Callable[[LatentShape, int], tuple[Make, str, float, float]]
) -> list[Work]:
    """The work for all heads and for one rank's; `work` returns arguments, shape, operations, bytes."""
    if model.latent is None:
        return []
    found = []
    for heads in dict.fromkeys((model.heads, max(model.heads // _RANKS, 1))):
        make, shape, flops, moved = work(model.latent, heads)
        found.append(Work(f"{shape}, {heads} heads", make, flops, moved))
    return found


def _cache(shape: LatentShape, step: StepShape, inputs: Inputs) -> LatentLayer:
    """A filled cache of the size that the step's rows need."""
    blocks = step.rows * step.blocks_per_row
    cache = make_latent_layer(blocks, BLOCK_SIZE, shape.latent, shape.rope, inputs.dtype, inputs.device)
    cache.rows.normal_(generator=inputs.generator)
    return cache


def _norm_and_write_latents(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    shape = model.latent
    tokens = step.tokens
    if shape is None or shape.query is None:
        return []
    query = shape.query
    row = shape.row

    def make(inputs: Inputs) -> tuple[Any, ...]:
        norms = LatentNorms(inputs.normal(query), inputs.normal(shape.latent), _EPS)
        cos_sin = inputs.rotation(tokens, shape.rope, interleaved=True)
        latents = inputs.normal(tokens, query + row)
        return latents, norms, *cos_sin, _cache(shape, step, inputs), slots_of(step, inputs), True

    moved = 2 * tokens * (query + row) * size + tokens * (8 * shape.rope + 8)
    return [Work(f"{tokens}x{query}+{row}", make, moved=moved)]


def _write_latent(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    shape = model.latent
    tokens = step.tokens
    if shape is None:
        return []

    def make(inputs: Inputs) -> tuple[Any, ...]:
        cos_sin = inputs.rotation(tokens, shape.rope, interleaved=True)
        rows = inputs.normal(tokens, shape.row)
        weight = inputs.normal(shape.latent)
        return rows, weight, _EPS, *cos_sin, _cache(shape, step, inputs), slots_of(step, inputs), True

    moved = 2 * tokens * shape.row * size + tokens * (8 * shape.rope + 8)
    return [Work(f"{tokens}x{shape.row}", make, moved=moved)]


def _absorb_queries(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    tokens = step.tokens

    def work(shape: LatentShape, heads: int) -> tuple[Make, str, float, float]:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            q = inputs.normal(tokens, heads, shape.nope + shape.rope)
            expansion = inputs.weight(heads * shape.nope, shape.latent).view(heads, shape.nope, -1)
            return q, expansion, *inputs.rotation(tokens, shape.rope, interleaved=True), True

        numbers = heads * shape.nope * shape.latent
        moved = numbers * size + tokens * heads * (shape.nope + shape.rope + shape.row) * size
        label = f"{tokens}x{shape.nope}x{shape.latent}"
        return make, label, 2.0 * tokens * numbers, moved + 8 * tokens * shape.rope

    return _each_count(model, work)


def _expand_values(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    tokens = step.tokens

    def work(shape: LatentShape, heads: int) -> tuple[Make, str, float, float]:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            expansion = inputs.weight(heads * shape.value, shape.latent).view(heads, shape.value, -1)
            return inputs.normal(tokens, heads, shape.latent), expansion

        numbers = heads * shape.value * shape.latent
        moved = (numbers + tokens * heads * (shape.latent + shape.value)) * size
        return make, f"{tokens}x{shape.latent}x{shape.value}", 2.0 * tokens * numbers, moved

    return _each_count(model, work)


def _latent_attention(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    def work(shape: LatentShape, heads: int) -> tuple[Make, str, float, float]:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            q = inputs.normal(step.tokens, heads, shape.row)
            return q, _cache(shape, step, inputs), plan_of(step, inputs), shape.row**-0.5

        both = shape.row + shape.latent
        moved = size * (step.rows * step.context * shape.row + step.tokens * heads * both)
        return make, f"{step.rows}x{step.new} of {step.context}", 2.0 * step.seen * heads * both, moved

    return _each_count(model, work)


def _prompt_attention(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    if step.new != step.context:
        return []

    def work(shape: LatentShape, heads: int) -> tuple[Make, str, float, float]:
        width = shape.nope + shape.rope

        def make(inputs: Inputs) -> tuple[Any, ...]:
            q = inputs.normal(step.tokens, heads, width)
            k = inputs.normal(step.tokens, heads, width)
            v = inputs.normal(step.tokens, heads, shape.value)
            return q, k, v, plan_of(step, inputs), width**-0.5

        moved = 2 * step.tokens * heads * (width + shape.value) * size
        flops = 2.0 * step.seen * heads * (width + shape.value)
        return make, f"{step.rows}x{step.new}, {width}+{shape.value}", flops, moved

    return _each_count(model, work)


LATENT_WORKS: dict[str, Callable[[ModelShape, StepShape, int], list[Work]]] = {
    "absorb_queries": _absorb_queries,
    "expand_values": _expand_values,
    "latent_attention": _latent_attention,
    "norm_and_write_latents": _norm_and_write_latents,
    "prompt_attention": _prompt_attention,
    "write_latent": _write_latent,
}
