"""e4m3fn as e4m3fnuz, for all 256 codes."""

import pytest
import torch

from atom_ops import BlockFP8, ChannelFP8
from atom_ops.weights.fnuz import as_fnuz, fnuz_values

CODES = torch.arange(256).to(torch.uint8)
NAN = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
NUMBERS = CODES[~torch.isin(CODES, NAN)]


def number(code: int, bias: int) -> float:
    """A code's value by the formats' definition: 1 sign, 4 exponent and 3 mantissa bits."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, (code >> 3) & 15, code & 7
    return sign * (
        mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    )


def test_every_code_is_worth_half() -> None:
    found = fnuz_values(NUMBERS.view(torch.float8_e4m3fn))
    assert found.dtype == torch.float8_e4m3fnuz
    for before, after, value in zip(
        NUMBERS.tolist(), found.view(torch.uint8).tolist(), found.float().tolist(), strict=True
    ):
        assert after == (0 if before == 0x80 else before)
        assert value == number(before, 8) == number(before, 7) / 2
    assert torch.equal(2 * found.float(), NUMBERS.view(torch.float8_e4m3fn).float())
    assert found.float().abs().max() == 224


@pytest.mark.parametrize("code", NAN.tolist())
def test_nan_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match="has NaN"):
        fnuz_values(torch.tensor([1, code], dtype=torch.uint8).view(torch.float8_e4m3fn))


def test_the_numbers_of_a_weight_stay() -> None:
    values = NUMBERS.view(torch.float8_e4m3fn).reshape(2, 127)
    for weight in (
        ChannelFP8(values, torch.tensor([0.3, 7.0]), torch.tensor(0.5)),
        ChannelFP8(values, torch.tensor([0.3, 7.0]), None, 1200.0),
        BlockFP8(values, torch.tensor([[0.3, 0.7]]), (128, 64)),
    ):
        made = as_fnuz(weight)
        assert type(made) is type(weight) and made.values.dtype == torch.float8_e4m3fnuz
        assert torch.equal(made.dequantized(torch.float32), weight.dequantized(torch.float32))
        if isinstance(weight, ChannelFP8) and isinstance(made, ChannelFP8) and weight.input_scale is not None:
            assert made.input_scale == 1.0
