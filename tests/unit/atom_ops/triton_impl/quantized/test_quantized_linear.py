"""Kernels of `linear` that the interpreter's plans do not choose."""

import pytest
import torch

from atom_ops import add_norm_linear, linear, silu_and_mul_linear
from atom_ops.triton_impl.hardware import target
from atom_ops.weights.samples import Format, random_weight

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (8, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_triton_gemv_by_whole_rows(outputs: int, inputs: int, with_bias: bool) -> None:
    from atom_ops.triton_impl.linear.linear import multiply
    from atom_ops.triton_impl.plans.linear_plans import LinearPlan

    x, weight, bias = torch.randn(1, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    plan = LinearPlan(1, True, 4, inputs, 4, 1, tiles=3)
    found = multiply(plan, x, weight, bias if with_bias else None)
    torch.testing.assert_close(found, linear.reference(x, weight, bias if with_bias else None))


@pytest.mark.parametrize("format", ["block_fp8", "int4_32_zeros", "int4_64", "int4_128_zeros", "mxfp4"])
def test_quantized_gemv_by_whole_rows(format: Format) -> None:
    from atom_ops.triton_impl.quantized.quantized_linear import multiply, packed
    from atom_ops.triton_impl.quantized.quantized_plans import GemvPlan

    generator = torch.Generator().manual_seed(3)
    x, residual, norm = torch.randn(3, 1, 384, generator=generator)
    weight, bias = random_weight((21, 384), format, torch.float32, generator), torch.randn(21)
    plan = GemvPlan(4, 0, 4, 2)
    read = packed(weight) or weight
    found = multiply(plan, x, read, bias, x.dtype, residual_TD=residual, norm_weight_D=norm[0], eps=1e-5)
    wanted = add_norm_linear.reference(x, residual, norm[0], 1e-5, weight, bias)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", ["block_fp8", "channel_fp8", "channel_int8", "int4_64", "mxfp4"])
@pytest.mark.parametrize("split_k", [1, 3])
def test_splits_of_quantized_gemms_are_summed(format: Format, split_k: int) -> None:
    from atom_ops.triton_impl.quantized.quantized_linear import multiply, packed
    from atom_ops.triton_impl.quantized.quantized_plans import GemmPlan

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(17, 2 * 640, generator=generator)
    weight = random_weight((40, 640), format, torch.float32, generator)
    plan = GemmPlan(64, 16, 32, 128, 4, 2, split_k)
    found, _ = multiply(plan, x, packed(weight) or weight, None, x.dtype, gated=True)
    wanted = silu_and_mul_linear.reference(x, weight)
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("format", ["int4_32_zeros", "int4_64", "int4_128_zeros", "int4_channel", "mxfp4"])
@pytest.mark.parametrize(("chunks", "split_k"), [(1, 1), (2, 2)])
def test_tiles_of_four_bit_gemms(format: Format, chunks: int, split_k: int) -> None:
    from atom_ops.triton_impl.quantized.four_bit_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_linear import packed
    from atom_ops.triton_impl.quantized.quantized_plans import GemmPlan

    generator = torch.Generator().manual_seed(3)
    x, bias = torch.randn(19, 640, generator=generator), torch.randn(40, generator=generator)
    weight = random_weight((40, 640), format, torch.float32, generator)
    words = packed(weight)
    assert words is not None
    found = multiply(GemmPlan(64, 16, 16, 128 * chunks, 4, 2, split_k), x, words, bias, torch.float32)
    torch.testing.assert_close(found, linear.reference(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", ["int4_32_zeros", "int4_128", "mxfp4"])
def test_decoding_four_bits_is_exact(format: Format) -> None:
    from atom_ops.triton_impl.quantized.four_bit_linear import dequantized
    from atom_ops.triton_impl.quantized.quantized_linear import packed

    weight = random_weight((13, 384), format, torch.float32, torch.Generator().manual_seed(3))
    words = packed(weight)
    assert words is not None
    assert torch.equal(dequantized(words, torch.float32), weight.dequantized(torch.float32))
