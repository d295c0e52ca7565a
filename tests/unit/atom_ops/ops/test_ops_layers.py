"""The small ops, against independent formulations."""

import numpy as np
import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.ops.attention.kv_cache import FP8, read_kv, without_padding_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def resolved() -> None:
    backend.resolve(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_match_the_published_llama_formula(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(48, eps=1e-6)
    weight = torch.rand(48).to(dtype)
    norm.weight.data = weight.float()
    x, residual = torch.randn(2, 5, 48).to(dtype)

    def published(rows: torch.Tensor) -> torch.Tensor:
        """In float32, and rounded once."""
        return norm(rows.float()).detach().to(dtype)

    torch.testing.assert_close(atom_ops.rms_norm(x, weight, 1e-6), published(x))
    normed, total = atom_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, published(x + residual))
    heads = x.view(5, 3, 16)
    by_head = atom_ops.rms_norm(heads, weight[:16], 1e-6)
    for head in range(3):
        alone = atom_ops.rms_norm(heads[:, head], weight[:16], 1e-6)
        torch.testing.assert_close(by_head[:, head], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_before_the_sum_is_rounded_as_if_it_were_alone(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 48).to(dtype)
    weight, x_weight = torch.rand(2, 48).to(dtype)
    normed, total = atom_ops.add_rms_norm(x, residual, weight, 1e-6, x_weight)
    assert torch.equal(total, atom_ops.rms_norm(x, x_weight, 1e-6) + residual)
    assert torch.equal(normed, atom_ops.rms_norm(total, weight, 1e-6))
    both = atom_ops.add_rms_norm(x, residual, None, 1e-6, x_weight)
    assert torch.equal(both[0], total) and torch.equal(both[1], total)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [32, 12])
def test_rotary_is_complex_multiplication(interleaved: bool, rot_dim: int) -> None:
    x, angles = torch.randn(7, 4, 32), torch.rand(7, 1, rot_dim // 2) * 6
    rotation = atom_ops.rotation(angles.cos(), angles.sin(), interleaved)
    found = atom_ops.rotary(x, *rotation, interleaved)
    half = rot_dim // 2
    first = slice(0, rot_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rot_dim, 2) if interleaved else slice(half, rot_dim)
    wanted = (x[..., first] + 1j * x[..., second]) * torch.exp(1j * angles)
    torch.testing.assert_close(found[..., first], wanted.real)
    torch.testing.assert_close(found[..., second], wanted.imag)
    assert torch.equal(found[..., rot_dim:], x[..., rot_dim:])


def test_rotary_supports_slices_of_a_qkv_projection() -> None:
    heads = torch.randn(5, 6, 16)[:, 1:4]
    rotation = torch.rand(2, 5, 1, 16)
    found = atom_ops.rotary(heads, *rotation)
    assert torch.equal(found, atom_ops.rotary(heads.contiguous(), *rotation))
    assert found.is_contiguous()


def test_vocabulary_shards_add_up() -> None:
    table, ids = torch.randn(103, 8), torch.randint(0, 103, (40,))
    parts = [atom_ops.embedding(ids, table[a:b], a) for a, b in ((0, 52), (52, 103))]
    assert torch.equal(parts[0] + parts[1], table[ids])


@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_with_a_packed_weight(tokens: int, with_bias: bool) -> None:
    weight, bias = torch.randn(65, 40), torch.randn(65) if with_bias else None
    packed = atom_ops.pack_linear_weight(weight)
    assert isinstance(packed, atom_ops.PackedOneDNN) and packed.tensor.is_mkldnn
    assert packed.shape == (65, 40)
    x = torch.randn(tokens, 90)[:, 7:47]
    wanted = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(atom_ops.linear(x, packed, bias), wanted, atol=1e-4, rtol=1e-4)


def test_weights_are_not_packed_where_that_cannot_help() -> None:
    backend.resolve(CPU, ["torch"])
    weight = torch.randn(4, 4)
    assert atom_ops.pack_linear_weight(weight) is weight
    backend.resolve(CPU)
    whole_numbers = torch.ones(4, 4, dtype=torch.float64)
    assert atom_ops.pack_linear_weight(whole_numbers) is whole_numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_kv_round_trip_and_bytes(dtype: torch.dtype) -> None:
    cache = atom_ops.make_kv_layer(6, 4, 2, 16, dtype, CPU)
    tensors = [cache.kv, *([] if cache.scale is None else [cache.scale])]
    assert sum(x.nbytes for x in tensors) == 6 * atom_ops.kv_bytes_per_block(4, 2, 16, dtype)
    k, v = torch.randn(2, 8, 2, 16) * torch.logspace(-3, 2, 8)[None, :, None, None]
    slots = torch.tensor([5, 0, 7, 23, 11, 1, 2, 8])
    atom_ops.write_kv(k, v, cache, slots)
    error = {torch.float32: 0.0, torch.bfloat16: 2**-8, FP8: 2**-4}[dtype]
    for found, wanted in zip(read_kv(cache, slots, torch.float32).unbind(1), (k, v), strict=True):
        largest = wanted.abs().amax(-1, keepdim=True)
        assert ((found - wanted).abs() <= error * largest).all()
    untouched = np.setdiff1d(np.arange(24), slots.numpy())
    assert not read_kv(cache, torch.from_numpy(untouched), torch.float32).any()


def test_every_float8_code_matches_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(FP8).float().isnan()]
    cache = atom_ops.make_kv_layer(len(codes), 1, 1, 1, FP8, CPU)
    cache.kv.view(torch.uint8)[:, 0, 0, 0, 0] = codes
    assert cache.scale is not None
    for scale in (1.0, 255.0, 2.0**-100):
        cache.scale.fill_(scale)
        found = read_kv(cache, torch.arange(len(codes)), torch.float32)[:, 0].flatten()
        assert torch.equal(found, codes.view(FP8).float() * scale)


def test_float8_stores_any_finite_number() -> None:
    cache = atom_ops.make_kv_layer(1, 4, 1, 2, FP8, CPU)
    k = torch.tensor([[0.0, 0.0], [1e-35, -1e-35], [3e38, 1.0], [-114240.0, 448.0]])[:, None]
    atom_ops.write_kv(k, k, cache, torch.arange(4))
    found = read_kv(cache, torch.arange(4), torch.float32)[:, 0, 0]
    assert found[0].tolist() == [0, 0]
    assert found[1].abs().max() < 1e-30
    assert found[2, 0] == 114240
    assert found[3, 0] == -114240


@pytest.mark.parametrize("slots", [[4, -1, 0, -1], [-1, 2], [-1, -1], [3]])
def test_padding_rows_store_nothing(slots: list[int]) -> None:
    """The path of a GPU, which does not read the slots on the host."""
    stored, new = torch.arange(5.0)[:, None].repeat(1, 3), torch.randn(len(slots), 3)
    wanted = stored.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot] = new[row]
    targets, numbers = without_padding_rows(stored, torch.tensor(slots), new)
    assert targets.min() >= 0
    assert torch.equal(stored.index_copy(0, targets, numbers), wanted)


@pytest.mark.parametrize("with_norms", [False, True])
def test_a_projection_is_split_rotated_and_stored(with_norms: bool) -> None:
    heads, kv_heads, width, tokens = 5, 2, 16, 7
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width)
    angles = torch.rand(tokens, 1, width // 2) * 6
    rotation = atom_ops.rotation(angles.cos(), angles.sin())
    q, k, v = qkv.view(tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
    norms = None
    if with_norms:
        norms = atom_ops.HeadNorms(torch.rand(width), torch.rand(width), 1e-5)
        q = atom_ops.rms_norm(q, norms.q_weight_E, 1e-5)
        k = atom_ops.rms_norm(k, norms.k_weight_E, 1e-5)
    cache = atom_ops.make_kv_layer(4, 4, kv_heads, width, torch.float32, CPU)
    slots = torch.tensor([3, 0, 15, 7, 8, 1, 2])
    found = atom_ops.rotate_and_write_kv(qkv, *rotation, cache, slots, norms)
    torch.testing.assert_close(found, atom_ops.rotary(q, *rotation))
    stored_k, stored_v = read_kv(cache, slots, torch.float32).unbind(1)
    torch.testing.assert_close(stored_k, atom_ops.rotary(k, *rotation))
    assert torch.equal(stored_v, v)
