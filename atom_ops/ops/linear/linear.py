"""Linear layer (GEMM), with a weight of any type."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.tolerances import REDUCTION
from atom_ops.weights import Packed, PackedOneDNN, Quantized, Reordered, Weight, dequantized_tiles
from atom_ops.weights.samples import ROUNDED, Format, random_weight


def _case(
    tokens: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
    out_dtype: torch.dtype | None = None,
    format: Format = "plain",
) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Weight, Tensor | None, torch.dtype | None]:
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = random_weight((outputs, inputs), format, dtype, generator)
        bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
        return x, weight, bias, out_dtype

    options = f"{'+bias' if with_bias else ''}{'->float32' if out_dtype else ''}"
    label = f"{tokens}x{inputs}x{outputs}{options}{'' if format == 'plain' else f'-{format}'}"
    return Case(label, make, ROUNDED.get(format))


@op(
    [
        _case(1, 576, 960, False),
        _case(1, 70, 49, True),
        _case(5, 64, 49, True),
        _case(7, 1000, 72, True),
        _case(16, 1024, 4096, False),
        _case(70, 128, 256, True),
        _case(1, 576, 160, False, torch.float32),
        _case(6, 64, 49, True, torch.float32),
        _case(130, 64, 200, False, torch.float32),
        _case(3, 300, 260, True, format="block_fp8"),
        _case(20, 256, 576, False, torch.float32, format="block_fp8"),
        _case(5, 96, 70, True, format="mxfp4"),
        _case(1, 300, 260, True, format="channel_fp8"),
        _case(20, 256, 576, False, torch.float32, format="channel_fp8"),
        _case(7, 256, 192, False, format="static_fp8"),
        _case(1, 300, 260, True, format="channel_int8"),
        _case(20, 256, 576, False, format="channel_int8"),
        _case(1, 256, 192, True, format="int4_32"),
        _case(9, 192, 80, False, format="int4_64"),
        _case(20, 384, 130, False, torch.float32, format="int4_128"),
        _case(3, 96, 72, True, format="int4_32_zeros"),
        _case(17, 256, 192, False, format="int4_128_zeros"),
        _case(2, 200, 64, False, format="int4_channel"),
        _case(1, 576, 200, True, format="affine_int4_32"),
        _case(3, 320, 72, True, format="affine_int4_32_offsets"),
        _case(2, 768, 90, False, torch.float32, format="affine_int6_16"),
        _case(9, 512, 50, True, format="affine_int6_16_offsets_units"),
        _case(5, 96, 70, False, torch.float32, format="affine_int8_16"),
        _case(20, 384, 130, True, format="affine_int8_32_offsets"),
    ],
    REDUCTION,
)
def linear(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weightᵀ + bias, [T, I] -> [T, O]; `weight` [O, I] as `pack_linear_weight` returned it.

    The result has `out_dtype`, by default x's dtype. On a GPU a float32 result is not rounded to
    x's dtype on the way. Quantized weights are rounded to x's dtype; activations are not quantized.
    """
    if isinstance(weight, Packed):
        raise TypeError(f"only its own provider reads a {type(weight).__name__}")
    if isinstance(weight, Reordered):
        return linear(x_TI.index_select(1, weight.order), weight.weight, bias, out_dtype)
    if not isinstance(weight, Tensor):
        return _by_tiles(x_TI, weight, bias, out_dtype)
    if out_dtype in (None, x_TI.dtype):
        return functional.linear(x_TI, weight, bias)
    if out_dtype == torch.float32 and x_TI.is_cuda:
        out_TO = torch.mm(x_TI, weight.t(), out_dtype=torch.float32)
        return out_TO if bias is None else out_TO + bias
    return functional.linear(x_TI, weight, bias).to(out_dtype)


def _by_tiles(x_TI: Tensor, weight: Quantized, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Multiply by a few dequantized rows at a time; these products may run on faster providers."""
    out_TO = x_TI.new_empty(x_TI.shape[0], weight.shape[0], dtype=out_dtype)
    start = 0
    for tile in dequantized_tiles(weight, x_TI.dtype):
        stop = start + tile.shape[0]
        out_TO[:, start:stop] = linear(x_TI, tile, None if bias is None else bias[start:stop], out_dtype)
        start = stop
    return out_TO


@linear.provider(
    "blas",
    needs="a GPU",
    supported=lambda device: device.type == "cuda",
    supports=lambda x_TI, weight, bias=None, out_dtype=None: isinstance(weight, Tensor),
    batch_invariant=False,
)
def _blas(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The vendor's GEMM library (cuBLAS, hipBLASLt) through torch; the fastest for many tokens."""
    return linear.reference(x_TI, weight, bias, out_dtype)


BATCH_INVARIANT = "batch_invariant"
"""The provider whose rows do not depend on the batch; used only with `batch_invariant`."""
_ONEDNN = "onednn_packed"
_ROWS_HINT = 16  # a layout that serves 4 to 256 rows best and costs single rows little


def pack_linear_weight(weight: Weight) -> Weight:
    """The weight [O, I] in the layout that is fastest for `linear`, and readable only by it.

    Call after `backend.resolve`. Returns the same weight where no other layout is faster.
    """
    if isinstance(weight, Reordered):
        return replace(weight, weight=linear.pack(weight.weight))
    packed: Weight = linear.pack(weight)
    return packed


def with_packed_weight(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Weight, Tensor | None, torch.dtype | None]:
    """The arguments of `linear` for a provider that packs weights: its `prepare`."""
    return x_TI, pack_linear_weight(weight), bias, out_dtype


def _pack_onednn(weight: Weight) -> PackedOneDNN | None:
    if not isinstance(weight, Tensor) or not _onednn_packs(weight.dtype):
        return None
    if weight.is_meta:  # a plan of the memory: oneDNN has no op for it, and the size stays the same
        return PackedOneDNN(torch.empty_like(weight), tuple(weight.shape))
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return PackedOneDNN(packed, tuple(weight.shape))


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Half precisions need the processor's own instructions for them."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@linear.provider(
    _ONEDNN,
    needs="a CPU and torch built with oneDNN",
    supported=lambda device: device.type == "cpu" and torch.backends.mkldnn.is_available(),
    supports=lambda x_TI, weight, bias=None, out_dtype=None: isinstance(weight, PackedOneDNN),
    prepare=with_packed_weight,
    pack=_pack_onednn,
    batch_invariant=False,
)
def _onednn_packed(
    x_TI: Tensor, weight: PackedOneDNN, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight.tensor, bias, "none", [], "")
    return out_TO if out_dtype is None else out_TO.to(out_dtype)
