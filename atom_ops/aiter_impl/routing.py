"""MoE routing: the top-k experts of a token in one kernel.

softmax, softmax_of_topk          topk_softmax
softmax of groups, sigmoid        grouped_topk, where a group's best expert is its score
sigmoid with a bias               biased_grouped_topk, where the sum of its best two is
"""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on
from atom_ops.ops.experts.routing import RoutingRule, route

_GROUPS = (1, 2, 4, 8)
"""Numbers of groups for which there are kernels."""
_VECTOR = 4
"""Experts that these kernels read at once."""
_SCORINGS = ("softmax", "softmax_of_topk", "sigmoid")
_MOST_TOP_K = 64


def _supports(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> bool:
    experts = logits_TX.shape[1]
    if not len(logits_TX) or rule.top_k > min(experts, _MOST_TOP_K) or rule.scoring not in _SCORINGS:
        return False
    if bias_X is None and _is_plain(rule):
        return rule.scale == 1.0
    if rule.groups not in _GROUPS or experts % (rule.groups * _VECTOR):
        return False
    if bias_X is None:
        return rule.groups == 1 or rule.group_best == 1
    return rule.scoring == "sigmoid" and rule.renormalise and (rule.groups == 1 or rule.group_best == 2)


def _is_plain(rule: RoutingRule) -> bool:
    """Whether a softmax over all experts decides, without groups."""
    return rule.scoring == "softmax_of_topk" or (rule.scoring == "softmax" and rule.groups == 1)


@route.provider("aiter", needs=NEEDS, supported=runs_on, supports=_supports, batch_invariant=False)
def _route(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    import aiter

    logits_TX = logits_TX.contiguous()
    shape = (len(logits_TX), rule.top_k)
    topk_weights_TJ = torch.empty(shape, dtype=torch.float32, device=logits_TX.device)
    topk_ids_TJ = torch.empty(shape, dtype=torch.int32, device=logits_TX.device)
    if bias_X is not None:
        aiter.biased_grouped_topk(
            gating_output=logits_TX.float(),  # the dtype of the bias
            correction_bias=bias_X,
            topk_weights=topk_weights_TJ,
            topk_ids=topk_ids_TJ,
            num_expert_group=rule.groups,
            topk_group=rule.kept_groups,
            need_renorm=rule.renormalise,
            routed_scaling_factor=rule.scale,
        )
    elif _is_plain(rule):
        aiter.topk_softmax(
            topk_weights=topk_weights_TJ,
            topk_indices=topk_ids_TJ,
            token_expert_indices=torch.empty_like(topk_ids_TJ),  # the kernel's own
            gating_output=logits_TX,
            need_renorm=rule.renormalise or rule.scoring == "softmax_of_topk",
        )
    else:
        aiter.grouped_topk(
            gating_output=logits_TX,
            topk_weights=topk_weights_TJ,
            topk_ids=topk_ids_TJ,
            num_expert_group=rule.groups,
            topk_group=rule.kept_groups,
            need_renorm=rule.renormalise,
            is_softmax=rule.scoring == "softmax",
            routed_scaling_factor=rule.scale,
        )
    return topk_ids_TJ.to(torch.int64), topk_weights_TJ
