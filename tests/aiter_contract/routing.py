"""AITER's routing: results in float32 and int32, with the experts of a token in any order."""

import torch
from torch import Tensor


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    need_renorm: bool,
) -> None:
    """Top-k of the softmax over all experts."""
    _check(topk_weights, topk_indices, gating_output)
    assert token_expert_indices.dtype == torch.int32 and token_expert_indices.shape == topk_indices.shape
    token_expert_indices.fill_(-1)
    scores = gating_output.float().softmax(-1)
    _write(topk_weights, topk_indices, scores, scores, need_renorm, 1.0)


def grouped_topk(
    gating_output: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    is_softmax: bool,
    routed_scaling_factor: float,
) -> None:
    """Top-k of the groups with the best experts."""
    _check(topk_weights, topk_ids, gating_output)
    assert gating_output.shape[1] % 4 == 0
    logits = gating_output.float()
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    choice = _kept(scores, num_expert_group, topk_group, 1)
    _write(topk_weights, topk_ids, choice, scores, need_renorm, routed_scaling_factor)


def biased_grouped_topk(
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float,
) -> None:
    """Top-k of sigmoids with a bias, which does not count in the weights."""
    _check(topk_weights, topk_ids, gating_output)
    assert correction_bias.dtype == gating_output.dtype and need_renorm and gating_output.shape[1] % 4 == 0
    assert correction_bias.shape == gating_output.shape[1:]
    scores = gating_output.float().sigmoid()
    choice = _kept(scores + correction_bias.float(), num_expert_group, topk_group, 2)
    _write(topk_weights, topk_ids, choice, scores, need_renorm, routed_scaling_factor)


def _check(weights: Tensor, ids: Tensor, logits: Tensor) -> None:
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and weights.shape == ids.shape
    assert weights.is_contiguous() and ids.is_contiguous() and logits.is_contiguous()
    assert len(weights) == len(logits) > 0


def _kept(scores: Tensor, groups: int, kept: int, best: int) -> Tensor:
    assert groups in (1, 2, 4, 8) and isinstance(kept, int) and not isinstance(kept, bool)
    if groups == 1:
        return scores
    by_group = scores.unflatten(1, (groups, -1))
    chosen = by_group.topk(best).values.sum(-1).topk(kept).indices
    lost = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, chosen, False)
    return by_group.masked_fill(lost.unsqueeze(-1), -torch.inf).flatten(1)


def _write(
    weights: Tensor, ids: Tensor, choice: Tensor, scores: Tensor, need_renorm: bool, scale: float
) -> None:
    assert isinstance(need_renorm, bool) and isinstance(scale, float)
    chosen = choice.topk(ids.shape[1]).indices
    found = scores.gather(1, chosen)
    weights.copy_((found / found.sum(-1, keepdim=True) if need_renorm else found) * scale)
    ids.copy_(chosen)
