"""Decoding of float8 codes in registers on a GPU: every code, in either byte of a word."""

import pytest
import torch

from atom_ops.ops.attention.kv_cache import FP8

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from atom_ops.triton_impl.quantized.fp8 import decode_fp8_pairs  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@triton.jit
def _decode(words, low, high, PTX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low_x, high_x = decode_fp8_pairs(tl.load(words + at), low.dtype.element_ty, PTX)
    tl.store(low + at, low_x)
    tl.store(high + at, high_x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ptx", [False, *([True] if torch.version.hip is None else [])])
def test_every_word(dtype: torch.dtype, ptx: bool) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    pairs = torch.cartesian_prod(codes, codes)
    count = len(pairs) // 512 * 512
    pairs = pairs[-count:].cuda().contiguous()
    low, high = torch.empty(2, count, dtype=dtype, device="cuda")
    _decode[(count // 512,)](pairs.view(torch.int16), low, high, PTX=ptx, BLOCK=512)
    wanted = pairs.view(FP8).to(dtype)
    assert torch.equal(low, wanted[:, 0]) and torch.equal(high, wanted[:, 1])
