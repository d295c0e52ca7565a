"""Linear layers in C++ with weights of integers."""

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import torch

import atom_ops
from atom_ops import AffineInts, ChannelINT8, GroupINT4, PackedInts, backend, native_impl, tensors_of
from atom_ops.native_impl.build import library
from atom_ops.weights import Integers

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def only_native() -> Iterator[None]:
    backend.resolve(CPU, ["native"])
    yield
    backend.resolve(CPU)


def ints(outputs: int, inputs: int, bits: int, group: int, with_offsets: bool) -> AffineInts:
    """Scales and offsets are of float16."""
    generator = torch.Generator().manual_seed(outputs)
    codes = codes_of(outputs, inputs, bits, generator)
    groups = (outputs, inputs // group)
    scales = (torch.randn(groups, generator=generator) / STD[bits] * inputs**-0.5).half()
    offsets = (torch.randn(groups, generator=generator) * inputs**-0.5).half()
    return AffineInts(codes, scales.float(), offsets.float() if with_offsets else None, narrow=bits == 6)


def ints_with_units(outputs: int, inputs: int, bits: int, group: int, with_offsets: bool) -> AffineInts:
    """Scales and offsets are integers, whose units change after 256 inputs."""
    generator = torch.Generator().manual_seed(outputs)
    codes = codes_of(outputs, inputs, bits, generator)
    groups = (outputs, inputs // group)
    scales, offsets = (torch.randint(-128, 128, groups, generator=generator).to(torch.int8) for _ in range(2))
    units = torch.randn(2, outputs, inputs // 256, generator=generator) * inputs**-0.5 / 128
    units = units.repeat_interleave(256 // group, 2)
    scale_units, offset_units = (units[0] / STD[bits]).half(), units[1].half()
    if not with_offsets:
        return AffineInts(codes, scales, scale_units=scale_units, narrow=bits == 6)
    return AffineInts(codes, scales, offsets, scale_units, offset_units, bits == 6)


STD = {4: 5, 6: 18, 8: 75}
"""Standard deviation of random codes, by their bits."""


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Each group's largest number becomes 32,767; float64."""
    groups = x.float().unflatten(1, (-1, group))
    tops = groups.abs().amax(2, keepdim=True)
    integers = (groups * (32767 / tops)).round()
    return (integers.double() * (tops.double() / 32767)).flatten(1)


def check(found: torch.Tensor, x: torch.Tensor, weight: Integers, bias: torch.Tensor | float = 0.0) -> None:
    """Rows of float32 are rounded; of bfloat16 only where the CPU has no instructions for pairs of it."""
    packed = atom_ops.pack_linear_weight(weight)
    assert isinstance(packed, PackedInts)
    exact = rounded(x, packed.group) if x.dtype == F32 else x.double()
    wanted = exact @ weight.dequantized(F32).double().T + bias
    tolerance = 2e-4 if x.dtype == F32 else 1e-3  # an integer may be the next one
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=5e-5)


def codes_of(outputs: int, inputs: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    if bits == 4:
        return torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    end = 1 << (bits - 1)
    return torch.randint(-end, end, (outputs, inputs), generator=generator).to(torch.int8)


def given(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, bias)."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    return x, torch.randn(outputs, generator=generator).to(dtype)


each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 16, 17, 50, 400])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "group", "with_offsets"),
    [
        (1, 32, 4, 32, False), (49, 96, 4, 32, True), (160, 576, 4, 64, False), (70, 4608, 4, 256, True),
        (33, 16, 8, 16, True), (50, 16, 6, 16, False), (70, 800, 6, 32, True),
        (200, 800, 8, 16, False), (65, 1024, 8, 32, True), (16, 640, 8, 640, False),
        (90, 768, 4, 768, True),
    ],
)  # fmt: skip
def test_linear_layers(
    rows: int, outputs: int, inputs: int, bits: int, group: int, with_offsets: bool, dtype: torch.dtype
) -> None:
    weight, (x, bias) = ints(outputs, inputs, bits, group, with_offsets), given(rows, outputs, inputs, dtype)
    packed = atom_ops.pack_linear_weight(weight)
    assert isinstance(packed, PackedInts) and packed.shape == (outputs, inputs)
    found = atom_ops.linear(x, packed, bias, F32)
    check(found, x, weight, bias)
    assert torch.equal(atom_ops.linear(x, packed, bias), found.to(dtype))
    assert "linear" not in backend.ran_in_torch()


@each_dtype
@pytest.mark.parametrize("rows", [1, 4, 5, 33])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "group", "with_offsets"),
    [(49, 256, 4, 32, True), (70, 768, 4, 16, True), (33, 512, 6, 16, False), (160, 1280, 6, 16, True)],
)
def test_integer_scales(
    rows: int, outputs: int, inputs: int, bits: int, group: int, with_offsets: bool, dtype: torch.dtype
) -> None:
    weight = ints_with_units(outputs, inputs, bits, group, with_offsets)
    x, bias = given(rows, outputs, inputs, dtype)
    packed = atom_ops.pack_linear_weight(weight)
    assert isinstance(packed, PackedInts) and packed.terms.dtype == torch.int8 and packed.block == 256
    check(atom_ops.linear(x, packed, bias, F32), x, weight, bias)


def test_a_part_of_the_inputs_has_smaller_blocks_of_units() -> None:
    whole = ints_with_units(40, 768, 6, 16, True)
    x, _ = given(3, 40, 768, F32)
    total = torch.zeros(3, 40)
    for start, stop, block in ((0, 384, 128), (384, 640, 128), (640, 768, 128)):
        groups = slice(start // 16, stop // 16)
        terms = (whole.scales, whole.offsets, whole.scale_units, whole.offset_units)
        parts = (None if part is None else part[:, groups] for part in terms)
        packed = atom_ops.pack_linear_weight(AffineInts(whole.codes[:, start:stop], *parts, narrow=True))
        assert isinstance(packed, PackedInts) and packed.block == block
        total += atom_ops.linear(x[:, start:stop], packed)
    check(total, x, whole)


@each_dtype
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_row_does_not_depend_on_the_others(bits: int, dtype: torch.dtype) -> None:
    """With AMX, which many rows of bfloat16 are multiplied by, the last bits of a few rows are others."""
    fewest = 5 if dtype == BF16 and library().atom_has_tiles() else 1
    packed = atom_ops.pack_linear_weight(ints(200, 1504, bits, 32, True))
    x, bias = given(130, 200, 1504, dtype)
    whole = atom_ops.linear(x, packed, bias)
    x[5] = torch.nan
    with_nan = atom_ops.linear(x, packed, bias)
    assert with_nan[5].isnan().all()
    for row in (0, 6, 64, 125):
        apart = atom_ops.linear(x[row : row + fewest], packed, bias)[0]
        assert torch.equal(apart, whole[row]) and torch.equal(apart, with_nan[row])


@each_dtype
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("rows", [1, 40])
def test_groups_of_very_different_size(bits: int, rows: int, dtype: torch.dtype) -> None:
    """A group is rounded by itself: one far larger costs the others nothing, and zeros stay zeros."""
    weight, (x, _) = ints(64, 256, bits, 32, True), given(rows, 64, 256, dtype)
    x[:, :32], x[:, 32:64], x[:, 64:96] = 0, x[:, 32:64] * 1e-35, x[:, 64:96] * 3e4
    packed = atom_ops.pack_linear_weight(weight)
    codes = weight.dequantized(F32).double()
    codes[:, 64:96] = 0
    without = x.clone()
    without[:, 64:96] = 0
    found = atom_ops.linear(without, packed, None, F32)
    torch.testing.assert_close(found.double(), x.double() @ codes.T, atol=1e-3, rtol=1e-4)
    large = atom_ops.linear(x, packed, None, F32).double()
    wanted = x.double() @ weight.dequantized(F32).double().T
    torch.testing.assert_close(large, wanted, atol=30.0, rtol=1e-3)  # 3e4 * 1e-3
    assert not atom_ops.linear(torch.zeros_like(x), packed).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    packed = atom_ops.pack_linear_weight(ints(64, 256, 4, 32, False))
    x, _ = given(3, 64, 256, F32)
    x[1, 100] = value
    found = atom_ops.linear(x, packed)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2].isfinite().all()


@each_dtype
@pytest.mark.parametrize("rows", [1, 9])
def test_fused_linear_layers_have_the_bits_of_their_parts(rows: int, dtype: torch.dtype) -> None:
    x, bias = given(rows, 80, 512, dtype)
    packed, norm = atom_ops.pack_linear_weight(ints(80, 512, 6, 16, True)), torch.rand(512).to(dtype)
    normed, total = atom_ops.add_rms_norm(x, x.flip(0), norm, 1e-6)
    found = atom_ops.add_norm_linear(x, x.flip(0), norm, 1e-6, packed, bias)
    assert torch.equal(found[0], atom_ops.linear(normed, packed, bias)) and torch.equal(found[1], total)
    gate_up = torch.cat((x, x.flip(0)), dim=1)
    gated = atom_ops.linear(atom_ops.silu_and_mul(gate_up), packed)
    assert torch.equal(atom_ops.silu_and_mul_linear(gate_up, packed), gated)
    assert not {"add_norm_linear", "silu_and_mul_linear", "linear"} & set(backend.ran_in_torch())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_activations_of_other_dtypes_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    packed = atom_ops.pack_linear_weight(ints(48, 96, 4, 32, True))
    x, bias = given(3, 48, 96, dtype)
    found = atom_ops.linear(x, packed, bias)
    assert found.dtype == dtype
    assert torch.equal(found, atom_ops.linear(x.float(), packed, bias.float()).to(dtype))


@each_dtype
def test_int4_with_zero_points_and_int8_of_channels(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (80, 128), generator=generator).to(torch.uint8)
    scales = (torch.rand(80, 8, generator=generator) / 50).half()
    zeros = torch.randint(0, 16, (80, 8), generator=generator).to(torch.uint8)
    values = torch.randint(-127, 128, (80, 256), generator=generator).to(torch.int8)
    x, _ = given(5, 80, 256, dtype)
    for weight in (
        GroupINT4(codes, scales), GroupINT4(codes, scales, zeros),
        ChannelINT8(values, torch.rand(80, generator=generator) / 500),
    ):  # fmt: skip
        packed = atom_ops.pack_linear_weight(weight)
        assert isinstance(packed, PackedInts)
        check(atom_ops.linear(x, packed, None, F32), x, weight)


def test_activations_that_are_not_contiguous() -> None:
    packed = atom_ops.pack_linear_weight(ints(48, 96, 4, 32, True))
    half = given(3, 48, 192, BF16)[0][:, :96]
    assert torch.equal(atom_ops.linear(half, packed), atom_ops.linear(half.contiguous(), packed))


def test_groups_that_are_not_packed() -> None:
    weight = AffineInts(torch.zeros(4, 48, dtype=torch.int8), torch.full((4, 6), 0.1))
    assert atom_ops.pack_linear_weight(weight) is weight


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(0.1, F32), (0.125, torch.float16), (70.0, F32), (1e-6, F32), (2**-30, torch.float16)],
)
def test_scales_are_exact(scale: float, dtype: torch.dtype) -> None:
    values = torch.arange(48, dtype=torch.int8).repeat(4, 1)
    x = torch.ones(2, 48)
    for weight in (
        AffineInts(values, torch.full((4, 3), scale)), ChannelINT8(values, torch.full((4,), scale)),
    ):  # fmt: skip
        packed = atom_ops.pack_linear_weight(weight)
        assert isinstance(packed, PackedInts) and packed.terms.dtype == dtype
        expected = x @ weight.dequantized(F32).T
        torch.testing.assert_close(atom_ops.linear(x, packed), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("made", [ints, ints_with_units])
def test_a_plan_of_the_memory_has_the_size_of_the_weight(made: Callable[..., AffineInts], bits: int) -> None:
    weight = made(100, 512, bits, 32, True)
    parts = (getattr(weight, field.name) for field in fields(weight))
    planned = AffineInts(*(part.to("meta") if isinstance(part, torch.Tensor) else part for part in parts))
    packed, real = (atom_ops.pack_linear_weight(each) for each in (planned, weight))
    assert isinstance(packed, PackedInts) and isinstance(real, PackedInts)
    sizes = [[(part.shape, part.dtype) for part in tensors_of(each)] for each in (packed, real)]
    assert sizes[0] == sizes[1] and packed.block == real.block
