"""AITER's GEMMs. Sums are in float64: no order of summation changes how the next layer's input is rounded."""

import torch
from torch import Tensor

from tests.aiter_contract import machine
from tests.aiter_contract.rounding import from_columns
from tests.aiter_contract.tiles import by_block, plain


def mm(inp: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """inp [M, K] times weights [N, K]."""
    assert inp.dim() == weights.dim() == 2 and inp.dtype == weights.dtype and inp.is_contiguous()
    assert bias is None or bias.shape == weights.shape[:1]
    out = inp.float() @ weights.float().T
    return (out if bias is None else out + bias.float()).to(inp.dtype)


def gemm_a8w8(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Plain weights; a scale for each token and each output."""
    assert XQ.dtype == WQ.dtype == torch.int8 and WQ.shape[0] % 8 == WQ.shape[1] % 16 == 0
    return _by_row(XQ, WQ, x_scale, w_scale, dtype)


def gemm_a8w8_bpreshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights in tiles; a scale for each token and each output."""
    assert XQ.dtype == WQ.dtype == machine.fp8()
    return _by_row(XQ, plain(WQ), x_scale, w_scale, dtype)


def gemm_a8w8_blockscale(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Plain weights in blocks of 128 x 128; a scale for each 128 inputs of a token, row by row."""
    assert XQ.dtype == WQ.dtype == machine.fp8() and WQ.shape[0] % 8 == 0
    return _by_blocks(XQ, WQ, x_scale, w_scale, dtype)


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights in tiles; the scales of activations are column by column."""
    assert XQ.dtype == WQ.dtype == machine.fp8()
    assert x_scale.shape == (len(XQ), XQ.shape[1] // 128)
    return _by_blocks(XQ, plain(WQ), from_columns(x_scale), w_scale, dtype)


def _by_row(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    assert XQ.is_contiguous() and WQ.is_contiguous() and XQ.shape[1] == WQ.shape[1]
    assert x_scale.shape == (len(XQ), 1) and w_scale.shape in ((len(WQ), 1), (1, len(WQ)))
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert x_scale.is_contiguous() and w_scale.is_contiguous()
    numbers = WQ.float() * w_scale.view(-1, 1)
    return multiplied(XQ.float() * x_scale, numbers, dtype)


def _by_blocks(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    assert XQ.is_contiguous() and WQ.is_contiguous() and XQ.shape[1] == WQ.shape[1]
    assert x_scale.shape == (len(XQ), XQ.shape[1] // 128) and x_scale.dtype == torch.float32
    return multiplied(XQ.float() * x_scale.repeat_interleave(128, 1), by_block(WQ, w_scale), dtype)


def multiplied(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] times weight [N, K]."""
    return (x.double() @ weight.double().T).to(dtype)
