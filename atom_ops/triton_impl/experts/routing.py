"""MoE routing in Triton: one program scores the experts of a token and selects the top k.

Scores become int32 ranks of the same order, because a warp finds the largest integer of its lanes with
one instruction. A token takes its top k one by one: the best rank, and of its experts the lowest number.
Where ranks have room for the numbers, one instruction finds both: see `_softmax_of_top`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.experts.routing import TINY, RoutingRule, route, weigh_inputs, weights_of_experts
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_TAKEN = tl.constexpr(-(1 << 31))
"""Lower than every rank."""
_NO_NUMBER = tl.constexpr((1 << 31) - 1)
_MOST_EXPERTS = 4096
_INPUTS_AT_ONCE = 1024
_OF_EACH = ("sigmoid", "sqrtsoftplus")
"""Scores that depend on the expert's own logit alone."""
_NUMBERS = tl.constexpr((1 << 13) - 1)
"""The bits of a float32 that are 0 if it was a float16 or bfloat16."""


@triton.jit
def _flipped(bits):
    """Between the bits of a float32 and an int32 that sorts like it, in both directions."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rank(score):
    """int32 that sorts like the score, NaN first, as in torch."""
    return tl.maximum(_flipped(score.to(tl.int32, bitcast=True)), _TAKEN + 1)


@triton.jit
def _score_of(rank):
    return _flipped(rank).to(tl.float32, bitcast=True)


@triton.jit
def _best_of(rank_GE, number_GE):
    """The best rank of each group, and the lowest number that has it."""
    best_G = tl.max(rank_GE, 1)
    return best_G, tl.min(tl.where(rank_GE == best_G[:, None], number_GE, _NO_NUMBER), 1)


@triton.jit
def _best(rank_G, number_G):
    """The best rank, and of the lowest number that has it."""
    best = tl.max(rank_G, 0)
    return best, tl.min(tl.where(rank_G == best, number_G, _NO_NUMBER), 0)


@triton.jit
def _in_best_groups(
    rank_GE, number_GE, groups, GROUP_BEST: tl.constexpr, KEPT_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr
):
    """The ranks, _TAKEN outside the token's top groups."""
    group_G = tl.arange(0, BLOCK_G)
    left_GE = rank_GE
    score_G = tl.zeros((BLOCK_G,), tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best_G, taken_G = _best_of(left_GE, number_GE)
        score_G += _score_of(best_G)
        left_GE = tl.where(number_GE == taken_G[:, None], _TAKEN, left_GE)
    rank_G = tl.where(group_G < groups, _rank(score_G), _TAKEN)
    for _ in tl.static_range(KEPT_GROUPS):
        _, taken = _best(rank_G, group_G)
        rank_G = tl.where(group_G == taken, _TAKEN, rank_G)
    # What was not taken is lost; groups that do not exist are _TAKEN in every rank.
    return tl.where((rank_G == _TAKEN)[:, None], rank_GE, _TAKEN)


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))), exact for small sums, too."""
    power = tl.exp(-tl.abs(x))
    total = 1.0 + power
    # log(1 + power) without the rounding of the sum.
    logarithm = tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0))
    logarithm = tl.where(total == 1.0, power, logarithm)
    return tl.sqrt(tl.maximum(x, 0.0) + logarithm)


@triton.jit
def _logit_of(key):
    return (_flipped(key) & (-1 - _NUMBERS)).to(tl.float32, bitcast=True)


@triton.jit
def _softmax_of_top(
    logit_E, number_E, exists_E, SCORING: tl.constexpr, TOP_K: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """The experts of the top k logits, which had 16 bits, and their weights.

    The lowest bits of a logit's rank are known. With the number in their place it is a key that no other
    expert has, which is greater the lower the number is: nothing but the maximum has to be found.
    """
    key_E = tl.where(
        exists_E, (_flipped(logit_E.to(tl.int32, bitcast=True)) | _NUMBERS) - number_E, _TAKEN
    )  # fmt: skip
    place_J = tl.arange(0, BLOCK_J)
    key_J = tl.zeros((BLOCK_J,), tl.int32)
    total = 0.0
    for place in tl.static_range(TOP_K):
        best = tl.max(key_E, 0)
        if place == 0:
            most = _logit_of(best)
        total += tl.exp(_logit_of(best) - most)
        key_J = tl.where(place_J == place, best, key_J)
        key_E = tl.where(key_E == best, _TAKEN, key_E)
    if SCORING == "softmax":
        total = tl.sum(tl.exp(logit_E - most), 0)
    return ~key_J & _NUMBERS, tl.exp(_logit_of(key_J) - most) / total


@triton.jit
def _top_scores(
    logits, bias, logit_GE, number_GE, exists_GE, tiny,
    GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, TOP_K: tl.constexpr,
    SCORING: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The experts of the top k scores, and their weights."""
    most = tl.max(tl.max(logit_GE, 1), 0)
    total = tl.sum(tl.sum(tl.exp(logit_GE - most), 1), 0)
    if SCORING == "softmax":
        score_GE = tl.exp(logit_GE - most) / total
    elif SCORING == "sigmoid":
        score_GE = tl.sigmoid(logit_GE)
    elif SCORING == "sqrtsoftplus":
        score_GE = _sqrt_softplus(logit_GE)
    else:
        score_GE = logit_GE
    if HAS_BIAS:
        score_GE += tl.load(bias + number_GE, mask=exists_GE, other=0.0).to(tl.float32)
    rank_GE = tl.where(exists_GE, _rank(score_GE), _TAKEN)
    if GROUPS > 1:
        rank_GE = _in_best_groups(rank_GE, number_GE, GROUPS, GROUP_BEST, KEPT_GROUPS, BLOCK_G)

    place_J = tl.arange(0, BLOCK_J)
    inside_J = place_J < TOP_K
    id_J, rank_J = tl.zeros((BLOCK_J,), tl.int32), tl.zeros((BLOCK_J,), tl.int32)
    for place in tl.static_range(TOP_K):
        best_G, number_G = _best_of(rank_GE, number_GE)
        best, number = _best(best_G, number_G)
        id_J = tl.where(place_J == place, number, id_J)
        rank_J = tl.where(place_J == place, best, rank_J)
        rank_GE = tl.where(number_GE == number, _TAKEN, rank_GE)

    if not HAS_BIAS:
        score_J = _score_of(rank_J)
    else:
        score_J = tl.load(logits + id_J, mask=inside_J, other=0.0).to(tl.float32)
        if SCORING == "softmax":
            score_J = tl.exp(score_J - most) / total
        elif SCORING == "sigmoid":
            score_J = tl.sigmoid(score_J)
        elif SCORING == "sqrtsoftplus":
            score_J = _sqrt_softplus(score_J)
    weight_J = score_J
    if SCORING == "softmax_of_topk":
        score_J = tl.where(inside_J, score_J, float("-inf"))
        weight_J = tl.exp(score_J - tl.max(score_J, 0))
        weight_J = weight_J / tl.sum(weight_J, 0)
    if RENORMALISE:
        weight_J = weight_J / (tl.sum(tl.where(inside_J, weight_J, 0.0), 0) + tiny)
    return id_J, weight_J


@triton.jit
def _route(
    logits, bias, topk_ids, topk_weights, tiny, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). KEYS: by `_softmax_of_top`."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    of_group: tl.constexpr = EXPERTS // GROUPS
    group_G = tl.arange(0, BLOCK_G)
    member_E = tl.arange(0, BLOCK_E)
    logits += token * EXPERTS
    if KEYS:
        exists_E = member_E < EXPERTS
        logit_E = tl.load(logits + member_E, mask=exists_E, other=float("-inf")).to(tl.float32)
        id_J, weight_J = _softmax_of_top(logit_E, member_E, exists_E, SCORING, TOP_K, BLOCK_J)
    else:
        number_GE = group_G[:, None] * of_group + member_E[None, :]
        exists_GE = (group_G < GROUPS)[:, None] & (member_E < of_group)[None, :]
        logit_GE = tl.load(logits + number_GE, mask=exists_GE, other=float("-inf")).to(tl.float32)
        id_J, weight_J = _top_scores(
            logits, bias, logit_GE, number_GE, exists_GE, tiny, GROUPS, KEPT_GROUPS, GROUP_BEST,
            TOP_K, SCORING, RENORMALISE, HAS_BIAS, BLOCK_G, BLOCK_J,
        )  # fmt: skip
    place_J = tl.arange(0, BLOCK_J)
    inside_J = place_J < TOP_K
    tl.store(topk_ids + token * TOP_K + place_J, id_J.to(tl.int64), mask=inside_J)
    tl.store(topk_weights + token * TOP_K + place_J, weight_J * scale, mask=inside_J)


def _supports(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> bool:
    return logits_TX.is_floating_point() and logits_TX.shape[1] <= _MOST_EXPERTS


@route.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logits_TX = logits_TX.contiguous()
    tokens, experts = logits_TX.shape
    topk_ids_TJ = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_TX.device)
    topk_weights_TJ = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_TX.device)
    if not tokens:
        return topk_ids_TJ, topk_weights_TJ
    scoring = rule.scoring
    # Groups have no effect if the scores are logits.
    groups = 1 if scoring == "softmax_of_topk" else rule.groups
    keys = logits_TX.element_size() == 2 and groups == 1 and bias_X is None and scoring not in _OF_EACH
    if keys and rule.renormalise:
        scoring = "softmax_of_topk"  # the same: the sum over all experts cancels out
    block_g = triton.next_power_of_2(groups)
    block_e = triton.next_power_of_2(experts // groups)
    _route[(tokens,)](
        logits_TX, bias_X, topk_ids_TJ, topk_weights_TJ, TINY, rule.scale,
        EXPERTS=experts, GROUPS=groups, KEPT_GROUPS=rule.kept_groups, GROUP_BEST=rule.group_best,
        TOP_K=rule.top_k, SCORING=scoring,
        RENORMALISE=rule.renormalise and scoring != "softmax_of_topk", HAS_BIAS=bias_X is not None,
        KEYS=keys, BLOCK_G=block_g, BLOCK_E=block_e, BLOCK_J=triton.next_power_of_2(rule.top_k),
        num_warps=1 if block_g * block_e <= 512 else 4,
        **launch_options(logits_TX.device),
    )  # fmt: skip
    return topk_ids_TJ, topk_weights_TJ


@triton.jit
def _weights_of_experts(
    logits, ids, weights, tiny, scale, experts,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    place_J = tl.arange(0, BLOCK_J)
    inside_J = place_J < TOP_K
    id_J = tl.load(ids + token * TOP_K + place_J, mask=inside_J, other=0)
    score_J = tl.load(logits + token * experts + id_J, mask=inside_J, other=0.0).to(tl.float32)
    if SCORING == "softmax":
        expert_X = tl.arange(0, BLOCK_X)
        inside_X = expert_X < experts
        logit_X = tl.load(logits + token * experts + expert_X, mask=inside_X, other=float("-inf"))
        logit_X = logit_X.to(tl.float32)
        most = tl.max(logit_X, 0)
        score_J = tl.exp(score_J - most) / tl.sum(tl.exp(logit_X - most), 0)
    elif SCORING == "sigmoid":
        score_J = tl.sigmoid(score_J)
    else:
        score_J = _sqrt_softplus(score_J)
    if RENORMALISE:
        score_J = score_J / (tl.sum(tl.where(inside_J, score_J, 0.0), 0) + tiny)
    tl.store(weights + token * TOP_K + place_J, score_J * scale, mask=inside_J)


def _supports_weights(logits_TX: Tensor, topk_ids_TJ: Tensor, rule: RoutingRule) -> bool:
    return _supports(logits_TX, rule) and rule.scoring != "softmax_of_topk"


@weights_of_experts.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports_weights)
def _launch_weights(logits_TX: Tensor, topk_ids_TJ: Tensor, rule: RoutingRule) -> Tensor:
    logits_TX = logits_TX.contiguous()
    topk_ids_TJ = topk_ids_TJ.contiguous()
    tokens, top_k = topk_ids_TJ.shape
    weights_TJ = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TX.device)
    if tokens:
        _weights_of_experts[(tokens,)](
            logits_TX, topk_ids_TJ, weights_TJ, TINY, rule.scale, logits_TX.shape[1],
            TOP_K=top_k, SCORING=rule.scoring, RENORMALISE=rule.renormalise,
            BLOCK_X=triton.next_power_of_2(logits_TX.shape[1]), BLOCK_J=triton.next_power_of_2(top_k),
            num_warps=1, **launch_options(logits_TX.device),
        )  # fmt: skip
    return weights_TJ


@triton.jit
def _weigh_inputs(
    x_ptr, weights_ptr, out_ptr, ones_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (tokens, blocks of features)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + token * SIZE + column, mask=inside, other=0.0)
    weight = tl.load(weights_ptr + token).to(x.dtype)
    tl.store(out_ptr + token * SIZE + column, x.to(tl.float32) * weight.to(tl.float32), mask=inside)
    tl.store(ones_ptr + token, 1.0)  # every block of a token stores the same


@weigh_inputs.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, topk_weights_T1: x_TD.is_floating_point() and topk_weights_T1.is_contiguous(),
)
def _launch_inputs(x_TD: Tensor, topk_weights_T1: Tensor) -> tuple[Tensor, Tensor]:
    x_TD = x_TD.contiguous()
    tokens, size = x_TD.shape
    out_TD, ones_T1 = torch.empty_like(x_TD), torch.empty_like(topk_weights_T1)
    if tokens:
        block = min(triton.next_power_of_2(size), _INPUTS_AT_ONCE)
        _weigh_inputs[(tokens, triton.cdiv(size, block))](
            x_TD, topk_weights_T1, out_TD, ones_T1, SIZE=size, BLOCK=block, num_warps=4,
            **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD, ones_T1
