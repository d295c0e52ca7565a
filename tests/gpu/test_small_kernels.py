"""Norms, RoPE, activation and KV writes on a GPU, at sizes of real models."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import atom_ops
from atom_ops import HeadNorms, KVLayer, backend
from atom_ops.ops.attention.kv_cache import FP8, read_kv

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
SIZES = {"qwen3-0.6b": (16, 8, 128, True), "llama-3.1-8b": (32, 8, 128, False), "smollm2": (9, 3, 64, False)}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU)
    yield
    backend.resolve(CPU)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


def projection(tokens: int, size: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, HeadNorms | None]:
    """A QKV projection, cosines and sines, and norms if the model has them."""
    heads, kv_heads, head_dim, with_norms = SIZES[size]
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(tokens, 1, head_dim // 2, device=GPU) * 6.3
    weights = torch.rand(2, head_dim, device=GPU).to(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if with_norms else None
    return qkv, *atom_ops.rotation(angles.cos(), angles.sin()), norms


def cache_for(tokens: int, size: str, dtype: torch.dtype) -> KVLayer:
    _, kv_heads, head_dim, _ = SIZES[size]
    return atom_ops.make_kv_layer(-(-tokens // 16) + 2, 16, kv_heads, head_dim, dtype, GPU)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("tokens", [1, 67, 1031])
def test_the_fused_op_matches_the_separate_ops(tokens: int, size: str, dtype: torch.dtype) -> None:
    qkv, cos, sin, norms = projection(tokens, size, dtype)
    slots = torch.randperm(tokens + 20, device=GPU)[:tokens]
    fused, parts = cache_for(tokens, size, dtype), cache_for(tokens, size, dtype)
    found = atom_ops.rotate_and_write_kv(qkv, cos, sin, fused, slots, norms)
    assert not atom_ops.rotate_and_write_kv.ran_reference
    wanted = atom_ops.rotate_and_write_kv.reference(qkv, cos, sin, parts, slots, norms)
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(fused.kv, parts.kv, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", HALVES)
def test_float8_is_within_its_own_rounding(dtype: torch.dtype) -> None:
    qkv, cos, sin, norms = projection(200, "qwen3-0.6b", dtype)
    slots = torch.randperm(220, device=GPU)[:200]
    coarse, exact = cache_for(200, "qwen3-0.6b", FP8), cache_for(200, "qwen3-0.6b", torch.float32)
    atom_ops.rotate_and_write_kv(qkv, cos, sin, coarse, slots, norms)
    atom_ops.rotate_and_write_kv(qkv, cos, sin, exact, slots, norms)
    found, wanted = read_kv(coarse, slots, torch.float32), read_kv(exact, slots, torch.float32)
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((found - wanted).abs() <= 2**-4 * wanted.abs() + 2**-10 * largest).all()
    assert largest.min() > 0


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("real", [0, 1, 5])
def test_a_negative_slot_stores_nothing(real: int, reference: bool, cache_dtype: torch.dtype) -> None:
    write: Callable[..., None] = atom_ops.write_kv.reference if reference else atom_ops.write_kv
    size = "llama-3.1-8b"
    k, v = randn(2, 8, 8, 128, dtype=torch.bfloat16).unbind()
    slots = torch.full((8,), -1, device=GPU)
    which = torch.tensor([1, 2, 4, 6, 7], device=GPU)[:real]
    slots[which] = torch.tensor([31, 0, 5, 17, 3], device=GPU)[:real]
    found, wanted = cache_for(32, size, cache_dtype), cache_for(32, size, cache_dtype)
    for cache in (found, wanted):
        write(k + 1, v - 1, cache, torch.arange(32, 40, device=GPU))
        write(k * 2, v * 3, cache, torch.arange(8, device=GPU))
    write(k, v, found, slots)
    write(k[which], v[which], wanted, slots[which])
    assert torch.equal(found.kv.view(torch.uint8), wanted.kv.view(torch.uint8))
    if found.scale is not None and wanted.scale is not None:
        assert torch.equal(found.scale, wanted.scale)


def test_kernels_in_a_graph_follow_their_inputs() -> None:
    """Norms, rotation with KV writes, activation, embedding: captured once, replayed with other values."""
    tokens, size = 16, "qwen3-0.6b"
    qkv, cos, sin, norms = projection(tokens, size, torch.bfloat16)
    table, weight = randn(1000, qkv.shape[1], dtype=torch.bfloat16), randn(qkv.shape[1], dtype=torch.bfloat16)
    ids, slots = torch.arange(tokens, device=GPU), torch.arange(tokens, device=GPU)
    cache = cache_for(tokens, size, torch.bfloat16)

    def step() -> tuple[Tensor, Tensor]:
        x = atom_ops.embedding(ids, table, 0)
        x, total = atom_ops.add_rms_norm(x, qkv, weight, 1e-6)
        x = atom_ops.rms_norm(x, weight, 1e-6)
        q = atom_ops.rotate_and_write_kv(x, cos, sin, cache, slots, norms)
        return atom_ops.silu_and_mul(total), q

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        ids.copy_(torch.randint(0, 1000, (tokens,)))
        slots.copy_(torch.where(torch.arange(tokens) < tokens - seed, torch.randperm(tokens), -1))
        qkv.copy_(randn(*qkv.shape, dtype=torch.bfloat16))
        cache.kv.zero_()
        graph.replay()
        replayed = [*(part.clone() for part in captured), cache.kv.clone()]
        cache.kv.zero_()
        again = [*step(), cache.kv]
        assert all(torch.equal(a, b) for a, b in zip(replayed, again, strict=True))
        written = cache.kv.flatten(2).any(-1).sum()
        assert written == tokens - seed


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "rotate_and_write_kv"])
def test_a_rows_bits_do_not_depend_on_its_batch(op: str) -> None:
    tokens, size = 300, "qwen3-0.6b"
    qkv, cos, sin, norms = projection(tokens, size, torch.bfloat16)
    weight = randn(qkv.shape[1], dtype=torch.bfloat16)

    def run(rows: slice) -> Tensor:
        if op == "rms_norm":
            return atom_ops.rms_norm(qkv[rows], weight, 1e-6)
        if op == "add_rms_norm":
            return atom_ops.add_rms_norm(qkv[rows], qkv[rows], weight, 1e-6)[0]
        cache, slots = cache_for(tokens, size, torch.bfloat16), torch.arange(tokens, device=GPU)
        return atom_ops.rotate_and_write_kv(qkv[rows], cos[rows], sin[rows], cache, slots[rows], norms)

    together = run(slice(None))
    for start in (0, 1, 130, 299):
        assert torch.equal(run(slice(start, start + 1))[0], together[start])


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norms_have_the_reference_bits_or_the_next(weight_dtype: torch.dtype) -> None:
    x, residual = randn(2, 257, 4096, dtype=torch.bfloat16).unbind()
    weight = torch.rand(4096, device=GPU).to(weight_dtype)
    found, total = atom_ops.add_rms_norm(x, residual, weight, 1e-6)
    wanted, wanted_total = atom_ops.add_rms_norm.reference(x, residual, weight, 1e-6)
    assert found.dtype == wanted.dtype
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(found, wanted, atol=0, rtol=2**-7)
    assert (found == wanted).float().mean() > 0.99
    for next_weight in (weight, None):
        after, total = atom_ops.add_rms_norm(x, residual, next_weight, 1e-6, weight)
        assert torch.equal(total, atom_ops.rms_norm(x, weight, 1e-6) + residual)
        assert torch.equal(after, total if next_weight is None else atom_ops.rms_norm(total, weight, 1e-6))
