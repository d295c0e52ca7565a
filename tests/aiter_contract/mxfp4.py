"""AITER's MXFP4: e2m1 in pairs, the first in the low nibble, and e8m0 scales of 32 inputs, in tiles."""

import torch
from torch import Tensor

from tests.aiter_contract import machine

_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_CODES, _SCALES = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


def codes_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [M, I], 0 to 15, and exponents plus 127 [M, I / 32].

    A group's largest magnitude, rounded to a power of two, becomes 4; halves round to even codes.
    """
    groups = rows.float().unflatten(-1, (-1, 32))
    bits = groups.abs().amax(-1).clamp(min=1e-10).view(torch.int32)
    exponents = (bits >> 23) + (bits >> 22 & 1) - 2
    scaled = groups / _powers(exponents).unsqueeze(-1)
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    above = scaled.abs().unsqueeze(-1) > middles
    above |= (scaled.abs().unsqueeze(-1) == middles) & (torch.arange(7) % 2 == 1)
    codes = above.sum(-1) + 8 * torch.signbit(scaled)
    return codes.flatten(-2).to(torch.uint8), exponents.to(torch.uint8)


def numbers(codes: Tensor, exponents: Tensor) -> Tensor:
    """What codes [..., I] and exponents stand for, float32."""
    values = _MAGNITUDES[codes.int() & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return values * _powers(exponents).repeat_interleave(32, -1)


def _powers(exponents: Tensor) -> Tensor:
    """Powers of 2, from exponents plus 127."""
    return (exponents.int() << 23).view(torch.float32)


def rounded(rows: Tensor) -> Tensor:
    return numbers(*codes_of(rows))


def e8m0_shuffle(scale: Tensor) -> Tensor:
    """[M, N] in tiles of 32 x 8, padded to multiples of 256 and 8; what is padded is undefined."""
    assert scale.dtype == torch.uint8 and scale.dim() == 2
    rows, columns = -(-scale.shape[0] // 256) * 256, -(-scale.shape[1] // 8) * 8
    padded = torch.full((rows, columns), 255, dtype=torch.uint8, device=scale.device)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    tiles = padded.view(rows // 32, 2, 16, columns // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(rows, columns)


def per_1x32_f4_quant_hip(x: Tensor, quant_dtype: torch.dtype, shuffle: bool) -> tuple[Tensor, Tensor]:
    """Codes [M, I / 2] and scales, [M, I / 32] or as `e8m0_shuffle` has them."""
    assert quant_dtype == _CODES and x.dim() == 2 and x.is_contiguous() and len(x) and x.shape[1] % 32 == 0
    codes, exponents = codes_of(x)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs.view(_CODES), (e8m0_shuffle(exponents) if shuffle else exponents).view(_SCALES)


def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bpreshuffle: bool,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A [M, K / 2] times B [N, K / 2], which is in tiles, as all scales are; without an MI350 it raises.

    One release writes to `out`, whose rows are a multiple of 32; the other makes the result, of that dtype.
    """
    assert machine.architecture == "gfx950" and bpreshuffle and A.dtype == B.dtype == _CODES
    assert A.is_contiguous() and A.shape[1] == B.shape[1] and A.shape[1] % 128 == 0
    x = numbers(_nibbles(A.view(torch.uint8)), _of_rows(A_scale, A.shape))
    weight = numbers(_nibbles(_plain_codes(B)), _of_rows(B_scale, B.shape))
    found = x.double() @ weight.double().T
    if out is None:
        assert dtype is not None
        return found.to(dtype)
    assert dtype is None and out.shape == (-(-len(A) // 32) * 32, len(B)) and out.is_contiguous()
    out.fill_(torch.nan)[: len(A)] = found.to(out.dtype)
    return out


def gemm_afp4wfp4(x: Tensor, w: Tensor, x_scales: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The Triton kernel: x [M, K / 2], w [N, K / 2], scales [M, K / 32] and [N, K / 32], all plain."""
    assert machine.architecture == "gfx950"
    assert {each.dtype for each in (x, w, x_scales, w_scales)} == {torch.uint8}
    assert x_scales.shape == (len(x), x.shape[1] // 16) and w_scales.shape == (len(w), w.shape[1] // 16)
    assert x.shape[1] == w.shape[1]
    product = numbers(_nibbles(x), x_scales).double() @ numbers(_nibbles(w), w_scales).double().T
    return product.to(dtype)


def shuffle_weight_a16w4(src: Tensor, NLane: int, gate_up: bool) -> Tensor:
    """[E, N, K / 2] for activations of 16 bits: 16 rows of gate and of up in turns, in tiles of 64 bytes."""
    assert src.dtype == _CODES and NLane == 16
    count, rows, width = src.shape
    parts = 2 if gate_up else 1
    tiles = src.view(torch.uint8).view(count, parts, rows // parts // 16, 16, width // 64, 4, 16)
    return tiles.permute(0, 2, 1, 4, 5, 3, 6).reshape(src.shape).view(_CODES)


def shuffle_scale_a16w4(src: Tensor, experts_cnt: int, gate_up: bool) -> Tensor:
    """[E * N, K / 32], in the same order of rows."""
    assert src.dtype == torch.uint8 and src.dim() == 2
    rows, columns = len(src) // experts_cnt, src.shape[1]
    assert rows % 32 == columns % 8 == 0
    if gate_up:
        tiles = src.view(experts_cnt, 2, rows // 32, 16, columns // 8, 2, 4).permute(0, 2, 4, 6, 3, 5, 1)
    else:
        tiles = src.view(experts_cnt, rows // 32, 2, 16, columns // 8, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)
    return tiles.reshape(src.shape)


def stack(weight: Tensor, scale: Tensor, interleaved: bool) -> Tensor:
    """The numbers of experts' matrices as `fused_moe` reads them, float32 [E, N, K]."""
    assert weight.dtype == _CODES and scale.dtype == _SCALES
    count, rows, half = weight.shape
    assert scale.numel() == count * rows * half // 16 and rows % 32 == 0 and half % 128 == 0
    found = []
    for codes, exponents in zip(weight, scale.view(count, rows, -1), strict=True):
        matrix = numbers(_nibbles(_tiles(codes)), _of_rows(exponents, codes.shape))
        if interleaved:
            matrix = matrix.unflatten(0, (-1, 2, 16)).transpose(0, 1).flatten(0, 2)
        found.append(matrix)
    return torch.stack(found)


def _nibbles(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _plain_codes(weight: Tensor) -> Tensor:
    assert getattr(weight, "is_shuffled", False), "the kernels read shuffled weights"
    return _tiles(weight)


def _tiles(weight: Tensor) -> Tensor:
    rows, width = weight.shape
    tiles = weight.view(torch.uint8).view(rows // 16, width // 32, 2, 16, 16)
    return tiles.permute(0, 3, 1, 2, 4).reshape(rows, width)


def _of_rows(scale: Tensor, shape: torch.Size) -> Tensor:
    """Exponents of a matrix whose codes have that shape."""
    assert scale.dtype == _SCALES and scale.is_contiguous()
    rows, columns = scale.shape
    tiles = scale.view(torch.uint8).view(rows // 32, columns // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(rows, columns)[: shape[0], : shape[1] // 16]
