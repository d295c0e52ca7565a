"""AITER's GEMM of 16-bit numbers."""

from torch import Tensor


def mm(inp: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """inp [M, K] times weights [N, K]."""
    assert inp.dim() == weights.dim() == 2 and inp.dtype == weights.dtype and inp.is_contiguous()
    assert bias is None or bias.shape == weights.shape[:1]
    out = inp.float() @ weights.float().T
    return (out if bias is None else out + bias.float()).to(inp.dtype)
