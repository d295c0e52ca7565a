"""MoE routing: the top-k experts of each token and their weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op

Scoring = Literal["softmax", "sigmoid", "softmax_of_topk", "sqrtsoftplus"]

TINY = 1e-20  # added to a sum of scores before it divides


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a model family selects experts from router logits."""

    top_k: int
    """Experts per token, J."""
    scoring: Scoring
    """softmax over all experts, sigmoid or sqrt(softplus) of each, or softmax over the top-k logits."""
    renormalise: bool = False
    """Divide the top-k scores by their sum; has no effect with softmax_of_topk."""
    scale: float = 1.0
    """Factor of every weight."""
    groups: int = 1
    """Consecutive experts form groups of equal size; a token uses only its top groups."""
    kept_groups: int = 1
    group_best: int = 2
    """A group's score is the sum of its `group_best` best scores."""

    def __post_init__(self) -> None:
        if self.groups < 1 or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"{self.kept_groups} of {self.groups} groups of experts cannot be kept")

    def check(self, experts: int) -> None:
        """Raise ValueError if this rule cannot route to `experts` experts."""
        if experts % self.groups:
            raise ValueError(f"{experts} experts do not form {self.groups} groups of one size")
        if self.groups > 1 and experts < self.group_best * self.groups:
            raise ValueError(f"{self.groups} groups of {experts} experts have no {self.group_best} each")
        if not 1 <= self.top_k <= experts // self.groups * self.kept_groups:
            raise ValueError(
                f"a token cannot choose {self.top_k} of {experts} experts"
                f" ({self.kept_groups} of {self.groups} groups)"
            )


def _case(tokens: int, experts: int, rule: RoutingRule, with_bias: bool = False) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, RoutingRule, Tensor | None]:
        # Distinct even in bfloat16: providers may order equal scores differently.
        steps = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
        logits = (8 * steps / experts - 4).to(dtype)
        bias = torch.rand(experts, generator=generator) if with_bias else None
        return logits, rule, bias

    return Case(f"{tokens}x{experts}-top{rule.top_k}-{rule.scoring}-{rule.groups}groups", make)


@op(
    [
        _case(1, 128, RoutingRule(8, "softmax", renormalise=True)),
        _case(33, 60, RoutingRule(4, "softmax")),
        _case(7, 8, RoutingRule(2, "softmax", renormalise=True)),
        _case(5, 160, RoutingRule(8, "sigmoid", renormalise=True, scale=2.5), with_bias=True),
        _case(9, 256, RoutingRule(8, "sigmoid", True, 2.5, groups=8, kept_groups=4), with_bias=True),
        _case(9, 64, RoutingRule(6, "softmax", scale=16.0, groups=8, kept_groups=3, group_best=1)),
        _case(17, 32, RoutingRule(4, "softmax_of_topk")),
        _case(9, 256, RoutingRule(6, "sqrtsoftplus", renormalise=True, scale=1.5), with_bias=True),
        _case(3, 40, RoutingRule(3, "sqrtsoftplus", renormalise=True)),
    ]
)
def route(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts of each token, int64 [T, J], and their weights, float32 [T, J].

    `bias_X` is added to the scores only for the selection; the weights come from the scores
    without it. Computed in float32. The order of a token's experts is not defined.
    """
    logits_TX = logits_TX.float()
    if rule.scoring == "softmax_of_topk":
        topk_ids_TJ = _biased(logits_TX, bias_X).topk(rule.top_k, dim=-1).indices
        return topk_ids_TJ, logits_TX.gather(1, topk_ids_TJ).softmax(-1) * rule.scale
    scores_TX = _scores(logits_TX, rule)
    choice_TX = _in_best_groups(_biased(scores_TX, bias_X), rule)
    topk_ids_TJ = choice_TX.topk(rule.top_k, dim=-1).indices
    return topk_ids_TJ, _weights(scores_TX, topk_ids_TJ, rule)


def _scores(logits_TX: Tensor, rule: RoutingRule) -> Tensor:
    if rule.scoring == "softmax":
        return logits_TX.softmax(-1)
    return logits_TX.sigmoid() if rule.scoring == "sigmoid" else functional.softplus(logits_TX).sqrt()


def _weights(scores_TX: Tensor, topk_ids_TJ: Tensor, rule: RoutingRule) -> Tensor:
    topk_weights_TJ = scores_TX.gather(1, topk_ids_TJ)
    if rule.renormalise:
        topk_weights_TJ = topk_weights_TJ / (topk_weights_TJ.sum(-1, keepdim=True) + TINY)
    return topk_weights_TJ * rule.scale


def _fixed_case(tokens: int, experts: int, rule: RoutingRule) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, RoutingRule]:
        logits = (3 * torch.randn(tokens, experts, generator=generator)).to(dtype)
        ids = [torch.randperm(experts, generator=generator)[: rule.top_k] for _ in range(tokens)]
        return logits, torch.stack(ids), rule

    return Case(f"{tokens}x{experts}-top{rule.top_k}-{rule.scoring}", make)


@op(
    [
        _fixed_case(9, 256, RoutingRule(6, "sqrtsoftplus", renormalise=True, scale=1.5)),
        _fixed_case(1, 40, RoutingRule(3, "sigmoid")),
        _fixed_case(5, 60, RoutingRule(4, "softmax", renormalise=True)),
    ]
)
def weights_of_experts(logits_TX: Tensor, topk_ids_TJ: Tensor, rule: RoutingRule) -> Tensor:
    """The weights, float32 [T, J], that `route` gives experts which are selected in another way.

    `topk_ids_TJ` is int64; softmax_of_topk has no scores and is not supported.
    """
    return _weights(_scores(logits_TX.float(), rule), topk_ids_TJ, rule)


def _inputs_case(tokens: int, hidden: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        return x, torch.rand(tokens, 1, generator=generator)

    return Case(f"{tokens}x{hidden}", make)


@op([_inputs_case(1, 5120), _inputs_case(9, 40), _inputs_case(64, 96)])
def weigh_inputs(x_TD: Tensor, topk_weights_T1: Tensor) -> tuple[Tensor, Tensor]:
    """(x * weight, ones): an expert's input and weight, where the weight of `route` multiplies the input.

    With one expert per token. The weight is rounded to x's dtype first; the ones are float32 [T, 1].
    """
    return x_TD * topk_weights_T1.to(x_TD.dtype), torch.ones_like(topk_weights_T1)


def _biased(scores_TX: Tensor, bias_X: Tensor | None) -> Tensor:
    return scores_TX if bias_X is None else scores_TX + bias_X


def _in_best_groups(scores_TX: Tensor, rule: RoutingRule) -> Tensor:
    """The scores, -inf outside each token's top groups."""
    if rule.groups == 1:
        return scores_TX
    scores_TGX = scores_TX.unflatten(1, (rule.groups, -1))
    best_TG = scores_TGX.topk(rule.group_best, dim=-1).values.sum(-1)
    kept_TG = best_TG.topk(rule.kept_groups, dim=-1).indices
    lost_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, kept_TG, False)
    return scores_TGX.masked_fill(lost_TG.unsqueeze(-1), float("-inf")).flatten(1)
