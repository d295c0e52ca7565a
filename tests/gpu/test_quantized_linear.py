"""`linear` with quantized weights on a GPU: every measured and general plan, against float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atom_ops import add_norm_linear, backend, linear, silu_and_mul_linear
from atom_ops.ops.elementwise.activation import silu_and_mul
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm
from atom_ops.weights import FourBitWords

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FORMATS = ("fp8-block", "fp8-channel", "int8-channel", "int4-128", "int4-32", "mxfp4")
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1000, 960))
EXACT, ROUNDED = 4e-3, 0.05
"""Relative errors: of bfloat16 results, and with activations in e4m3 or int8."""
REPEATS, MANY = 10, 2000

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU)
    yield
    backend.resolve(CPU)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def readable(format: str, shape: tuple[int, int]) -> Any:
    from tools.tune_quantized import made_weight

    group = int(format.split("-")[1]) if format.startswith("int4") else 32
    if shape[1] % group:
        pytest.skip("the groups do not divide the inputs")
    return made_weight(format, *shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_plan(format: str, shape: tuple[int, int]) -> None:
    """Several times: a race shows in one tile of thousands."""
    from atom_ops.triton_impl.quantized.known_plans import plans_of
    from atom_ops.triton_impl.quantized.quantized_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_plans import LibraryPlan, general_plans, key_of

    torch.manual_seed(5)
    weight = readable(format, shape)
    exact = weight.dequantized(torch.float32)
    limit = EXACT if format.startswith(("int4", "mxfp4")) else ROUNDED
    for plan in dict.fromkeys([*plans_of(weight), *general_plans(key_of(weight))]):
        if isinstance(plan, LibraryPlan) and shape[0] % 16:
            continue
        if isinstance(weight, FourBitWords) and not plan.takes(weight, torch.bfloat16, torch.bfloat16):
            continue
        tokens = min(plan.tokens, 300)
        x = torch.randn(tokens, shape[1], device=GPU, dtype=torch.bfloat16)
        wanted = x.float() @ exact.T
        first = multiply(plan, x, weight, None, x.dtype)[0]
        assert error(first, wanted) < limit, plan
        for _ in range(REPEATS):
            assert torch.equal(multiply(plan, x, weight, None, x.dtype)[0], first), plan


@pytest.mark.parametrize("outputs", [4096, 1000])
@pytest.mark.parametrize("format", ["fp8-block", "fp8-channel"])
def test_stream_k_of_several_tiles(format: str, outputs: int) -> None:
    """A tile of 128 tokens, two, and tiles that end within; with a bias where the rows end within one."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized.quantized_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_plans import FP8StreamKPlan

    if not is_hopper(GPU):
        pytest.skip("for Hopper")
    torch.manual_seed(6)
    weight = readable(format, (outputs, 4096))
    exact = weight.dequantized(torch.float32)
    bias = None if outputs % 64 == 0 else torch.randn(outputs, device=GPU).bfloat16()
    for tokens in (1, 65, 128, 129, 200, 256):
        x = torch.randn(tokens, 4096, device=GPU, dtype=torch.bfloat16)
        wanted = x.float() @ exact.T + (0.0 if bias is None else bias.float())
        for programs in (96, 128):
            plan = FP8StreamKPlan(65, 256, 64, 128, 8, programs)
            first = multiply(plan, x, weight, bias, x.dtype)[0]
            assert error(first, wanted) < ROUNDED, (tokens, plan)
            for _ in range(REPEATS):
                assert torch.equal(multiply(plan, x, weight, bias, x.dtype)[0], first), (tokens, plan)


def test_stream_k_of_few_tokens_many_times() -> None:
    """Programs wait for each other's sums: a wrong one is rare. The last block of scales is half as large."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized.quantized_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_plans import FP8StreamKPlan

    if not is_hopper(GPU):
        pytest.skip("for Hopper")
    torch.manual_seed(6)
    weight = readable("fp8-block", (2624, 6144))
    x = torch.randn(16, 6144, device=GPU, dtype=torch.bfloat16)
    wanted = x.float() @ weight.dequantized(torch.float32).T
    plan = FP8StreamKPlan(1, 16, 64, 128, 8, 128)
    first = multiply(plan, x, weight, None, x.dtype)[0]
    assert error(first, wanted) < ROUNDED
    differ = torch.zeros((), dtype=torch.int64, device=GPU)
    for _ in range(MANY):
        differ += (multiply(plan, x, weight, None, x.dtype)[0] != first).any()
    assert differ.item() == 0


@pytest.mark.parametrize("shape", [(1088, 4096), (4096, 12288)], ids=str)
def test_the_persistent_gemv(shape: tuple[int, int]) -> None:
    """Every candidate, alone with a bias and with the activation before it."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized.quantized_candidates import candidates
    from atom_ops.triton_impl.quantized.quantized_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_plans import PersistentGemvPlan

    if not is_hopper(GPU):
        pytest.skip("for Hopper")
    torch.manual_seed(7)
    weight, (outputs, inputs) = readable("fp8-block", shape), shape
    exact = weight.dequantized(torch.float32)
    bias = torch.randn(outputs, device=GPU).bfloat16()
    both = torch.randn(1, 2 * inputs, device=GPU, dtype=torch.bfloat16)
    gate, up = both.float().chunk(2, 1)
    gated = (torch.nn.functional.silu(gate) * up).bfloat16().float() @ exact.T
    for plan in candidates(("fp8-block", outputs, inputs), 1):
        if isinstance(plan, PersistentGemvPlan):
            found = multiply(plan, both[:, :inputs], weight, bias, both.dtype)[0]
            assert error(found, gate @ exact.T + bias) < EXACT, plan
            first = multiply(plan, both, weight, None, both.dtype, gated=True)[0]
            assert error(first, gated) < EXACT, plan
            for _ in range(REPEATS):
                assert torch.equal(multiply(plan, both, weight, None, both.dtype, gated=True)[0], first), plan


@pytest.mark.parametrize("format", ["int4-128", "mxfp4"])
@pytest.mark.parametrize("shape", [(1008, 4096), (512, 12288), (4096, 4096), (24576, 4096)], ids=str)
def test_few_tokens_by_a_ring(format: str, shape: tuple[int, int]) -> None:
    """Programs with fewer stages than the ring, and with more."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized import four_bit_ring
    from atom_ops.triton_impl.quantized.quantized_plans import RingPlan

    if not is_hopper(GPU):
        pytest.skip("needs Hopper")
    torch.manual_seed(8)
    weight = readable(format, shape)
    assert four_bit_ring.reads(weight)
    exact = weight.dequantized(torch.float32)
    bias = torch.randn(shape[0], device=GPU).bfloat16()
    for tokens, stages, warps in ((1, 4, 8), (1, 2, 16), (3, 4, 8), (8, 3, 8)):
        x = torch.randn(tokens, shape[1], device=GPU, dtype=torch.bfloat16)
        out = torch.empty(tokens, shape[0], device=GPU, dtype=torch.bfloat16)
        four_bit_ring.multiply(RingPlan(8, stages, warps), x, weight, bias, out)
        assert error(out, x.float() @ exact.T + bias) < EXACT
        again = torch.empty_like(out)
        for _ in range(REPEATS):
            four_bit_ring.multiply(RingPlan(8, stages, warps), x, weight, bias, again)
            assert torch.equal(again, out)


@pytest.mark.parametrize("format", ["int4-128", "mxfp4"])
@pytest.mark.parametrize("shape", [(1008, 4096), (512, 12288), (4096, 4096), (24576, 4096)], ids=str)
def test_one_token_by_a_ring_after_a_norm_or_an_activation(format: str, shape: tuple[int, int]) -> None:
    """As their own kernels and the ring alone; programs of both sizes."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized.quantized_linear import multiply
    from atom_ops.triton_impl.quantized.quantized_plans import RingPlan

    if not is_hopper(GPU):
        pytest.skip("needs Hopper")
    torch.manual_seed(8)
    weight = readable(format, shape)
    outputs, inputs = shape
    bias, norm = torch.randn(outputs, device=GPU).bfloat16(), torch.rand(inputs, device=GPU).bfloat16()
    x, residual = torch.randn(2, 1, inputs, device=GPU, dtype=torch.bfloat16).unbind()
    both = torch.cat([x, residual], 1)
    normed, summed = add_rms_norm(x, residual, norm, 1e-6)
    before: tuple[tuple[torch.Tensor, torch.Tensor, dict[str, Any]], ...] = (
        (rms_norm(x, norm, 1e-6), x, {"norm_weight_D": norm, "eps": 1e-6}),
        (normed, summed, {"norm_weight_D": norm, "residual_TD": residual, "eps": 1e-6}),
        (silu_and_mul(both), both, {"gated": True}),
    )
    for plan in (RingPlan(1, 4), RingPlan(1, 2, 16), RingPlan(1, 3)):
        for alone, total, options in before:
            wanted = multiply(plan, alone, weight, bias, x.dtype)[0]
            first = multiply(plan, both if "gated" in options else x, weight, bias, x.dtype, **options)
            assert error(first[0], wanted.float()) < EXACT / 2, (plan, options.keys())
            assert torch.equal(first[1], total)
            for _ in range(REPEATS):
                again = multiply(plan, both if "gated" in options else x, weight, bias, x.dtype, **options)
                assert torch.equal(again[0], first[0]) and torch.equal(again[1], total), plan


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("format", ["int4-128", "int4-64", "int4-32", "mxfp4"])
@pytest.mark.parametrize("shape", [(1000, 960), (520, 12288), (4096, 4096)], ids=str)
def test_few_tokens_on_tensor_cores(format: str, shape: tuple[int, int], zeros: bool) -> None:
    """Columns and rows that fill no step and no tile; a zero of its own for each group."""
    from atom_ops.triton_impl.quantized import four_bit_mma
    from atom_ops.triton_impl.quantized.quantized_plans import MmaPlan

    if format == "mxfp4" and zeros:
        pytest.skip("e2m1 has no zeros")
    torch.manual_seed(8)
    weight = readable(format, shape)
    if zeros:
        offsets = torch.randint(0, 17, weight.scales.shape, dtype=torch.uint8, device=GPU)
        weight = dataclasses.replace(weight, zeros=offsets)
    exact = weight.dequantized(torch.float32)
    bias = torch.randn(shape[0], device=GPU).bfloat16()
    for tokens, warps, tiles in ((1, 8, 1), (1, 4, 2), (3, 2, 1), (8, 16, 1)):
        x = torch.randn(tokens, shape[1], device=GPU, dtype=torch.bfloat16)
        out = torch.empty(tokens, shape[0], device=GPU, dtype=torch.bfloat16)
        four_bit_mma.multiply(MmaPlan(8, warps, tiles), x, weight, bias, out)
        assert error(out, x.float() @ exact.T + bias) < EXACT
        again = torch.empty_like(out)
        for _ in range(REPEATS):
            four_bit_mma.multiply(MmaPlan(8, warps, tiles), x, weight, bias, again)
            assert torch.equal(again, out)


@pytest.mark.parametrize("format", ["int4-128", "int4-64", "int4-32", "mxfp4"])
@pytest.mark.parametrize("shape", [(1000, 960), (1000, 1024), (520, 12288), (4096, 4096)], ids=str)
def test_four_bits_by_wgmma(format: str, shape: tuple[int, int]) -> None:
    """Rows, columns and tokens that fill no tile, with one step to a split and with many; a bias."""
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.quantized import four_bit_split_k, four_bit_wgmma
    from atom_ops.triton_impl.quantized.quantized_plans import WgmmaPlan

    if not is_hopper(GPU):
        pytest.skip("for Hopper")
    torch.manual_seed(9)
    weight = readable(format, shape)
    if not four_bit_wgmma.reads(weight):
        pytest.skip("groups that end within a chunk")
    exact = weight.dequantized(torch.float32)
    bias = torch.randn(shape[0], device=GPU).bfloat16()
    for tokens, *tiling in (
        *((1, 8, 2, 8, 2), (7, 16, 3, 7), (16, 16, 2, 4, 2, 2), (33, 64, 2, 4, 2), (64, 64, 3, 1)),
        *((100, 128, 2, 3), (128, 128, 3, 4), (300, 128, 3, 2), (300, 64, 2, 1)),
    ):
        plan = WgmmaPlan(tokens, *tiling)
        x = torch.randn(tokens, shape[1], device=GPU, dtype=torch.bfloat16)
        found = four_bit_split_k.multiply(plan, x, weight, bias)
        assert error(found, x.float() @ exact.T + bias) < EXACT, plan
        for _ in range(REPEATS):
            assert torch.equal(four_bit_split_k.multiply(plan, x, weight, bias), found), plan


@pytest.mark.parametrize("format", FORMATS)
def test_ops_before_and_biases(format: str) -> None:
    torch.manual_seed(6)
    weight = readable(format, (4096, 4096))
    exact = weight.dequantized(torch.float32)
    bias, norm = torch.randn(4096, device=GPU).bfloat16(), torch.rand(4096, device=GPU).bfloat16()
    for tokens in (1, 7, 64, 200):
        x, residual = torch.randn(2, tokens, 4096, device=GPU, dtype=torch.bfloat16).unbind()
        assert error(linear(x, weight, bias), x.float() @ exact.T + bias) < ROUNDED
        found, total = add_norm_linear(x, residual, norm, 1e-6, weight, bias)
        assert torch.equal(total, x + residual)
        normed = torch.nn.functional.rms_norm(total.float(), (4096,), norm.float(), 1e-6).bfloat16()
        assert error(found, normed.float() @ exact.T + bias) < ROUNDED
        both = torch.randn(tokens, 8192, device=GPU, dtype=torch.bfloat16)
        gated = (torch.nn.functional.silu(both[:, :4096].float()) * both[:, 4096:]).bfloat16()
        assert error(silu_and_mul_linear(both, weight), gated.float() @ exact.T) < ROUNDED
