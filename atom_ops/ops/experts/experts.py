"""Mixture of experts: the gated MLP of each expert over the tokens routed to it.

T tokens, J experts per token, P = T * J token-expert pairs, X experts, D hidden, F expert features.

    tokens, experts     sorted by expert       two GEMMs per expert        unsorted, weighted
    t0: e2 e0           e0: t0 t1              [2, D] -> [2, F] -> [2, D]   t0 = w e2(t0) + w e0(t0)
    t1: e0 e1           e1: t1                 [1, D] -> [1, F] -> [1, D]   t1 = w e0(t1) + w e1(t1)
                        e2: t0                 [1, D] -> [1, F] -> [1, D]
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.elementwise.activation import clamped_swiglu, silu_and_mul
from atom_ops.ops.linear.linear import BATCH_INVARIANT, linear
from atom_ops.tolerances import REDUCTION
from atom_ops.weights import Packed, PackedInts, Shuffled, Weight
from atom_ops.weights.samples import ROUNDED, Format, random_weight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of the experts of a layer, of all or of some."""

    gate_up_XOD: Weight
    """[X, 2F, D]: the gate's rows, then up's."""
    down_XDF: Weight
    gate_up_bias_XO: Tensor | None = None
    down_bias_XD: Tensor | None = None
    complete: bool = True
    """Whether these are all experts of the layer."""
    first: int = 0
    """The id of the first of these experts; those of other ranks have ids below it, or from first + X on."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Parameters of the activation `clamped_swiglu`."""

    limit: float
    alpha: float
    shift: float = 1.0
    """1 or 0."""


ExpertActivation = ClampedSwiglu | None
"""Between an expert's two GEMMs; None: `silu_and_mul`."""


def clamp_kind(activation: ExpertActivation) -> int:
    """The activation as kernels are compiled for it; 0: not clamped, 1: with a shift of 1, 2: without it.

    Raises ValueError for another shift than 1 and 0.
    """
    if activation is None:
        return 0
    if activation.shift not in (0, 1):
        raise ValueError(f"clamped_swiglu with shift {activation.shift} is not supported: use 0 or 1")
    return 1 if activation.shift else 2


@dataclass(frozen=True, slots=True)
class ExpertRole:
    """Which matrix of `ExpertWeights` a weight is, in a layer of which kind: its layout may depend on it."""

    down: bool
    activation: ExpertActivation = None
    with_biases: bool = False


def _case(
    tokens: int,
    top_k: int,
    experts: int,
    sizes: tuple[int, int],
    activation: ExpertActivation = None,
    idle: int = 0,
    first: int | None = None,
    format: Format = "plain",
) -> Case:
    """The last `idle` experts get no token. `first`: the weights are those from there on of twice as many."""
    hidden, features = sizes
    with_bias = activation == _GPT_OSS

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, ExpertActivation]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        weights = ExpertWeights(
            random_weight((experts, 2 * features, hidden), format, dtype, generator),
            random_weight((experts, hidden, features), format, dtype, generator),
            normal(experts, 2 * features).to(dtype) if with_bias else None,
            normal(experts, hidden).to(dtype) if with_bias else None,
        )
        routed = experts - idle if first is None else 2 * experts
        picked = [torch.randperm(routed, generator=generator)[:top_k] for _ in range(tokens)]
        topk_weights = torch.rand(tokens, top_k, generator=generator)
        x = normal(tokens, hidden).to(dtype)
        ids = torch.stack(picked)
        if first is not None:
            weights = replace(weights, complete=False, first=first)
        return x, ids, topk_weights / topk_weights.sum(1, keepdim=True), weights, activation

    kind = "clamped" if activation else "silu"
    kind += ("" if first is None else f"-from{first}") + ("" if format == "plain" else f"-{format}")
    return Case(f"{tokens}x{top_k}of{experts}x{hidden}x{features}-{kind}", make, ROUNDED.get(format))


_GPT_OSS = ClampedSwiglu(7.0, 1.702)
_WITHOUT_SHIFT = ClampedSwiglu(2.0, 1.0, shift=0.0)


@op(
    [
        _case(1, 2, 8, (64, 96)),
        _case(7, 8, 60, (48, 24), idle=20),
        _case(70, 4, 16, (128, 64)),
        _case(5, 1, 3, (33, 17)),
        _case(1, 4, 32, (96, 48), _GPT_OSS),
        _case(19, 2, 5, (72, 40), _GPT_OSS, idle=2),
        _case(1, 3, 8, (64, 96), _WITHOUT_SHIFT),
        _case(30, 3, 12, (40, 64), _WITHOUT_SHIFT, first=5),
        _case(30, 3, 12, (40, 64), first=5),
        _case(30, 3, 12, (64, 32), first=5),
        _case(9, 4, 6, (64, 32), _GPT_OSS, first=0, format="mxfp4"),
        _case(9, 2, 5, (200, 128), format="block_fp8"),
        _case(9, 2, 5, (64, 96), _GPT_OSS, format="mxfp4"),
        _case(1, 2, 5, (200, 128), format="channel_fp8"),
        _case(9, 2, 5, (64, 96), first=0, format="static_fp8"),
        _case(9, 2, 5, (200, 128), format="channel_int8"),
        _case(1, 2, 5, (128, 96), format="int4_32"),
        _case(9, 2, 5, (128, 256), first=0, format="int4_128_zeros"),
        _case(3, 2, 5, (64, 40), format="int4_channel"),
        _case(1, 2, 5, (128, 96), format="affine_int4_32_offsets"),
        _case(9, 2, 5, (64, 96), first=0, format="affine_int6_16_offsets_units"),
        _case(20, 2, 5, (48, 64), _GPT_OSS, format="affine_int8_16"),
    ],
    REDUCTION,
)
def experts(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    """The weighted sum of each token's experts, [T, D] in x's dtype. See `linear` for quantized weights.

    `topk_ids_TJ` int64 and `topk_weights_TJ` float32 as returned by `route`. NaN in one row does not reach
    other rows; with a batch-invariant `linear` a row's bits depend on that row alone. Experts'
    results are summed in float32. Does not synchronise with a GPU.

    Other ids than those of `weights` add nothing: experts of other ranks, where `weights` are not complete.
    """
    experts_here = weights.down_XDF.shape[0]
    if not weights.complete:  # ids of no expert here sort last
        topk_ids_TJ = topk_ids_TJ - weights.first
        topk_ids_TJ = topk_ids_TJ.where((topk_ids_TJ >= 0) & (topk_ids_TJ < experts_here), experts_here)
    if x_TD.is_cuda and (BATCH_INVARIANT in linear.order or not _has_grouped_gemm(x_TD, weights)):
        return _dense_fallback(x_TD, topk_ids_TJ, topk_weights_TJ, weights, activation)
    tokens, top_k = topk_ids_TJ.shape
    ids_P, order_P = topk_ids_TJ.flatten().sort(stable=True)
    numbers_X = torch.arange(experts_here, device=x_TD.device)
    ends_X = torch.searchsorted(ids_P, numbers_X, right=True, out_int32=True)
    if not weights.complete:
        ids_P = ids_P.clamp(max=experts_here - 1)  # an index into biases, for rows that are skipped below
    x_PD = x_TD[order_P // top_k]
    inner_PO = _grouped_gemm(x_PD, weights.gate_up_XOD, weights.gate_up_bias_XO, ids_P, ends_X)
    inner_PF = _activate(inner_PO, activation)
    sorted_PD = _grouped_gemm(inner_PF, weights.down_XDF, weights.down_bias_XD, ids_P, ends_X)
    out_PD = torch.empty_like(sorted_PD)
    out_PD[order_P] = sorted_PD
    out_TJD = out_PD.unflatten(0, (tokens, top_k)).float()
    if not weights.complete:  # no GEMM has written the rows of other experts
        out_TJD = out_TJD.where((topk_ids_TJ < experts_here).unsqueeze(-1), 0.0)
    return (out_TJD * topk_weights_TJ.unsqueeze(-1)).sum(1).to(x_TD.dtype)


def pack_expert_weight(weight: Weight, role: ExpertRole) -> Weight:
    """The weight [X, O, I] in the layout that is fastest for `experts`, and readable by its reference too.

    Call after `backend.resolve`. Returns the same weight where no other layout is faster.
    """
    packed: Weight = experts.pack(weight, role)
    return packed


def _activate(x_P2F: Tensor, activation: ExpertActivation) -> Tensor:
    if activation is None:
        return silu_and_mul(x_P2F)
    return clamped_swiglu(x_P2F, activation.limit, activation.alpha, activation.shift)


def _grouped_gemm(
    x_PI: Tensor, weight_XOI: Weight, bias_XO: Tensor | None, ids_P: Tensor, ends_X: Tensor
) -> Tensor:
    """Grouped GEMM: each row times the weight of its expert, [P, O]; expert e's rows end at ends_X[e]."""
    if x_PI.is_cuda:
        assert isinstance(weight_XOI, Tensor), "checked by `_has_grouped_gemm`"
        out_PO = functional.grouped_mm(x_PI, weight_XOI.transpose(1, 2), offs=ends_X)
    else:
        out_PO = x_PI.new_empty(x_PI.shape[0], weight_XOI.shape[1])
        start = 0
        for expert, end in enumerate(ends_X.tolist()):
            if end > start:
                _multiply(x_PI[start:end], _expert(weight_XOI, expert), out_PO[start:end])
            start = end
    return out_PO if bias_XO is None else out_PO + bias_XO[ids_P]


def _multiply(x_TI: Tensor, weight: Weight, out_TO: Tensor) -> None:
    if isinstance(weight, Tensor):
        torch.mm(x_TI, weight.t(), out=out_TO)
    else:
        out_TO.copy_(linear(x_TI, weight))


def _expert(weight_XOI: Weight, number: int) -> Weight:
    """One expert's matrix [O, I]."""
    if isinstance(weight_XOI, Tensor):
        return weight_XOI[number]
    if isinstance(weight_XOI, Shuffled | PackedInts):
        return weight_XOI.expert(number)
    if isinstance(weight_XOI, Packed):
        raise TypeError("a layout for `linear` alone has no stacks of experts")
    return weight_XOI.expert(number)


def _has_grouped_gemm(x_TD: Tensor, weights: ExpertWeights) -> bool:
    """Whether torch's grouped GEMM runs on this GPU without synchronising.

    Its kernels need plain bfloat16 on Hopper or Blackwell and rows of a multiple of 16 bytes;
    otherwise torch loops over the groups on the host, which synchronises.
    """
    matrices = (weights.gate_up_XOD, weights.down_XDF)
    return (
        x_TD.dtype == torch.bfloat16
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x_TD.device)[0] in (9, 10)
        and all(isinstance(matrix, Tensor) and matrix.shape[2] % 8 == 0 for matrix in matrices)
    )


def _dense_fallback(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
) -> Tensor:
    """Dense fallback: every expert over every token, X / J times the work, without a synchronisation."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in range(weights.down_XDF.shape[0]):
        here_TJ = topk_ids_TJ == expert
        topk_weight_T1 = topk_weights_TJ.where(here_TJ, 0.0).sum(1, keepdim=True)
        gate_up, down = _expert(weights.gate_up_XOD, expert), _expert(weights.down_XDF, expert)
        inner_T2F = linear(x_TD, gate_up, _bias_of(weights.gate_up_bias_XO, expert))
        inner_TF = _activate(inner_T2F, activation)
        y_TD = linear(inner_TF, down, _bias_of(weights.down_bias_XD, expert))
        # `where` and not a factor of 0, because 0 * inf would be NaN.
        out_TD += (y_TD.float() * topk_weight_T1).where(here_TJ.any(1, keepdim=True), 0.0)
    return out_TD.to(x_TD.dtype)


def _bias_of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
