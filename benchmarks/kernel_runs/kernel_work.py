"""The arguments of a model's op calls, with their bytes and floating-point operations.

Bytes are the minimum: every needed value is read once, every result written once. Shape suffixes
as in `atom_ops`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom_ops import (
    AttentionRule,
    ExpertWeights,
    HeadNorms,
    KVLayer,
    RoutingRule,
    SamplingBatch,
    make_kv_layer,
    pack_linear_weight,
)
from atom_ops.op import REGISTRY, Op
from benchmarks.kernel_runs.kernel_inputs import Inputs, Work, moved_to, plan_of, slots_of
from benchmarks.kernel_runs.kernel_shapes import BLOCK_SIZE, ModelShape, StepShape
from benchmarks.kernel_runs.latent_work import LATENT_WORKS, latent_gemms

__all__ = ["Inputs", "Work", "bytes_of", "works"]

_EPS = 1e-6
_POSITIONS = 8192


def works(op: Op[..., Any], model: ModelShape, step: StepShape, dtype: torch.dtype) -> list[Work]:
    """The calls of one op in one step; an op without model shapes uses its test cases."""
    table = _WORKS.get(op.name)
    if model.latent and op.name in _OF_KEYS_AND_VALUES:
        table = None
    if table is not None and (found := table(model, step, dtype.itemsize)):
        return found
    return [Work(f"own case {case.label}", _from_case(case.make), flops=None) for case in op.cases]


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in arguments or results."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _from_case(make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]) -> Callable[[Inputs], Any]:
    def arguments(inputs: Inputs) -> Any:
        return moved_to(make(inputs.dtype, torch.Generator().manual_seed(1)), inputs.device)

    return arguments


def _gemms(model: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a layer's GEMMs, by name."""
    gemms = latent_gemms(model) or {
        "qkv": (model.hidden, model.qkv),
        "o": (model.heads * model.head_dim, model.hidden),
    }
    if model.experts:
        return gemms | {"router": (model.hidden, model.experts)}
    return gemms | {"gate_up": (model.hidden, 2 * model.features), "down": (model.features, model.hidden)}


def _linear(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    def work(name: str, tokens: int, inputs: int, outputs: int) -> Work:
        def make(given: Inputs) -> tuple[Any, ...]:
            if name == "lm_head":  # plain in quantized models too
                return given.normal(tokens, inputs), given.weight(outputs, inputs), None, torch.float32
            return given.normal(tokens, inputs), given.layer(outputs, inputs)

        return Work(f"{name} {tokens}x{inputs}x{outputs}", make, 2.0 * tokens * inputs * outputs)

    found = [work(name, step.tokens, *shape) for name, shape in _gemms(model).items()]
    return [*found, work("lm_head", step.rows, model.hidden, model.vocab)]


def _add_norm_linear(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    tokens = step.tokens
    hidden = model.hidden

    def work(name: str, outputs: int) -> Work:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            x = inputs.normal(tokens, hidden)
            residual = inputs.normal(tokens, hidden)
            return x, residual, inputs.normal(hidden), _EPS, pack_linear_weight(inputs.layer(outputs, hidden))

        return Work(f"{name} {tokens}x{hidden}x{outputs}", make, 2.0 * tokens * hidden * outputs)

    gemms = _gemms(model)
    return [work(name, gemms[name][1]) for name in ("qkv", "qkv_a", "q_kv_a", "gate_up") if name in gemms]


def _silu_and_mul_linear(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    if model.experts:
        return []
    tokens = step.tokens
    features = model.features
    hidden = model.hidden

    def make(inputs: Inputs) -> tuple[Any, ...]:
        return inputs.normal(tokens, 2 * features), pack_linear_weight(inputs.layer(hidden, features))

    return [Work(f"down {tokens}x{features}x{hidden}", make, 2.0 * tokens * features * hidden)]


def _rms_norm(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    shape = (step.tokens, model.hidden)
    return [Work("x".join(map(str, shape)), lambda make: (make.normal(*shape), make.normal(shape[1]), _EPS))]


def _add_rms_norm(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    shape = (step.tokens, model.hidden)
    return [
        Work(
            "x".join(map(str, shape)),
            lambda make: (make.normal(*shape), make.normal(*shape), make.normal(shape[1]), _EPS),
        )
    ]


def _silu_and_mul(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    rows = step.tokens * (model.chosen or 1)
    features = model.expert_features if model.experts else model.features
    return [Work(f"{rows}x{features}", lambda make: (make.normal(rows, 2 * features),))]


def _embedding(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    tokens = step.tokens
    hidden = model.hidden
    vocab = model.vocab
    return [
        Work(
            f"{tokens} of {vocab}x{hidden}",
            lambda make: (make.ids(vocab, tokens), make.normal(vocab, hidden), 0),
            moved=tokens * (2 * hidden * size + 8),
        )
    ]


def _rotary(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    heads = model.heads + model.kv_heads
    width = model.head_dim
    return [
        Work(
            f"{step.tokens}x{heads}x{width}",
            lambda make: (make.normal(step.tokens, heads, width), *make.rotation(step.tokens, width)),
        )
    ]


def _rotation_at(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    tokens = step.tokens
    width = model.latent.rope if model.latent else model.head_dim
    return [
        Work(
            f"{tokens}x{width}",
            lambda make: (make.normal(_POSITIONS, width, dtype=torch.float32), make.ids(_POSITIONS, tokens)),
            moved=tokens * (3 * width * 4 + 8),
        )
    ]


def _cache(model: ModelShape, step: StepShape, inputs: Inputs) -> KVLayer:
    """A filled cache of the size that the step's rows need."""
    blocks = step.rows * step.blocks_per_row
    cache = make_kv_layer(blocks, BLOCK_SIZE, model.kv_heads, model.head_dim, inputs.dtype, inputs.device)
    cache.kv.normal_(generator=inputs.generator)
    return cache


def _kv_bytes(model: ModelShape, tokens: int, size: int) -> int:
    return 2 * tokens * model.kv_heads * model.head_dim * size


def _write_kv(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    shape = (step.tokens, model.kv_heads, model.head_dim)
    return [
        Work(
            "x".join(map(str, shape)),
            lambda make: (
                make.normal(*shape), make.normal(*shape), _cache(model, step, make), slots_of(step, make)
            ),
            moved=2 * _kv_bytes(model, step.tokens, size) + 8 * step.tokens,
        )
    ]  # fmt: skip


def _projected(model: ModelShape, step: StepShape, inputs: Inputs) -> tuple[Any, ...]:
    norms = None
    if model.head_norms:
        norms = HeadNorms(inputs.normal(model.head_dim), inputs.normal(model.head_dim), _EPS)
    return (
        inputs.normal(step.tokens, model.qkv),
        *inputs.rotation(step.tokens, model.head_dim),
        _cache(model, step, inputs),
        slots_of(step, inputs),
        norms,
    )


def _projected_bytes(model: ModelShape, step: StepShape, size: int) -> int:
    """Reads the projection, cosines and sines; writes queries, keys and values."""
    return step.tokens * (2 * model.qkv * size + 2 * model.head_dim * 4 + 8)


def _rotate_and_write_kv(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    return [
        Work(
            f"{step.tokens}x{model.qkv}",
            lambda make: _projected(model, step, make),
            moved=_projected_bytes(model, step, size),
        )
    ]


def _attention_label(model: ModelShape, step: StepShape) -> str:
    return f"{step.rows}x{step.new} of {step.context}, {model.heads}/{model.kv_heads}x{model.head_dim}"


def _attention_flops(model: ModelShape, step: StepShape) -> float:
    return 4.0 * step.seen * model.heads * model.head_dim


def _paged_attention(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(step.tokens, model.heads, model.head_dim)
        return q, _cache(model, step, inputs), plan_of(step, inputs), AttentionRule(model.head_dim**-0.5)

    queries = 2 * step.tokens * model.heads * model.head_dim * size
    moved = queries + _kv_bytes(model, step.rows * step.context, size)
    return [Work(_attention_label(model, step), make, _attention_flops(model, step), moved)]


def _attend_projection(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        return *_projected(model, step, inputs), plan_of(step, inputs), AttentionRule(model.head_dim**-0.5)

    before = step.rows * (step.context - step.new)
    moved = _projected_bytes(model, step, size) + _kv_bytes(model, before, size)
    return [Work(_attention_label(model, step), make, _attention_flops(model, step), moved)]


def _decode_inputs(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    rows = step.rows
    width = step.blocks_per_row

    def make(inputs: Inputs) -> tuple[Any, ...]:
        table = torch.from_numpy(step.block_table()).to(inputs.device)
        positions = torch.full((rows,), step.context - 1, device=inputs.device)
        return (
            torch.arange(rows, device=inputs.device),
            inputs.ids(model.vocab, rows),
            positions,
            table,
            BLOCK_SIZE,
        )

    return [Work(f"{rows}x{width}", make)]


def _route(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    if not model.experts:
        return []
    rule = RoutingRule(model.chosen, "softmax", renormalise=True)
    return [
        Work(
            f"{step.tokens}, {model.chosen} of {model.experts}",
            lambda make: (make.normal(step.tokens, model.experts), rule),
        )
    ]


def _experts(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    """Tokens choose experts at random; the bytes are those of the expected number of experts."""
    if not model.experts:
        return []
    tokens = step.tokens
    hidden = model.hidden
    features = model.expert_features

    def make(inputs: Inputs) -> tuple[Any, ...]:
        weights = ExpertWeights(
            inputs.normal(model.experts, 2 * features, hidden).div_(hidden**0.5),
            inputs.normal(model.experts, hidden, features).div_(features**0.5),
        )
        scores = torch.rand(tokens, model.experts, device=inputs.device, generator=inputs.generator)
        shares, ids = scores.topk(model.chosen, dim=-1)
        return inputs.normal(tokens, hidden), ids, shares / shares.sum(1, keepdim=True), weights

    read = model.experts * (1 - (1 - model.chosen / model.experts) ** tokens)
    moved = size * (3 * read * hidden * features + 2 * tokens * hidden) + 12 * tokens * model.chosen
    label = f"{tokens}, {model.chosen} of {model.experts}, {hidden}x{features}"
    return [Work(label, make, 6.0 * tokens * model.chosen * hidden * features, moved)]


def _sample(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    rows = step.rows
    vocab = model.vocab

    def work(name: str, temperature: float, top_p: float) -> Work:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            batch = SamplingBatch.from_host(
                temperature=np.full(rows, temperature, np.float32),
                top_k=np.zeros(rows, np.int64),
                top_p=np.full(rows, top_p, np.float32),
                min_p=np.zeros(rows, np.float32),
                seed=np.arange(rows, dtype=np.uint64),
                sequence=np.zeros(rows, np.int64),
                device=inputs.device,
            )
            logits = inputs.normal(rows, vocab, dtype=torch.float32).mul_(4)
            return logits, batch, inputs.ids(_POSITIONS, rows)

        return Work(f"{name} {rows}x{vocab}", make)

    return [work("greedy", 0.0, 1.0), work("temperature", 1.0, 1.0), work("top-p", 1.0, 0.9)]


def _token_logprobs(model: ModelShape, step: StepShape, size: int) -> list[Work]:
    rows = step.rows
    vocab = model.vocab

    def work(top: int) -> Work:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            return inputs.normal(rows, vocab, dtype=torch.float32), inputs.ids(vocab, rows), top

        return Work(f"{rows}x{vocab}, top {top}", make)

    return [work(0), work(5)]


_WORKS: dict[str, Callable[[ModelShape, StepShape, int], list[Work]]] = {
    "add_norm_linear": _add_norm_linear,
    "add_rms_norm": _add_rms_norm,
    "attend_projection": _attend_projection,
    "decode_inputs": _decode_inputs,
    "embedding": _embedding,
    "experts": _experts,
    "linear": _linear,
    "paged_attention": _paged_attention,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "rotate_and_write_kv": _rotate_and_write_kv,
    "rotation_at": _rotation_at,
    "route": _route,
    "sample": _sample,
    "silu_and_mul": _silu_and_mul,
    "silu_and_mul_linear": _silu_and_mul_linear,
    "token_logprobs": _token_logprobs,
    "write_kv": _write_kv,
    **LATENT_WORKS,
}
_OF_KEYS_AND_VALUES = ("attend_projection", "paged_attention", "rotate_and_write_kv", "rotary", "write_kv")
"""Ops that a model with latent attention does not call."""
assert _WORKS.keys() <= REGISTRY.keys()
