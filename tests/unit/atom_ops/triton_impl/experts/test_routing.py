"""`route` in Triton where scores are equal, infinite or NaN."""

import pytest
import torch

from atom_ops import RoutingRule, route
from atom_ops.ops.experts.routing import Scoring
from atom_ops.triton_impl.hardware import target

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")

GROUPED = RoutingRule(4, "sigmoid", True, 2.5, groups=4, kept_groups=2)


def routed(
    logits_TX: torch.Tensor, rule: RoutingRule, bias_X: torch.Tensor | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """Ids in ascending order, and the weights in the same order."""
    from atom_ops.triton_impl.experts.routing import _launch

    topk_ids_TJ, topk_weights_TJ = _launch(logits_TX, rule, bias_X)
    order_TJ = topk_ids_TJ.argsort(1)
    return topk_ids_TJ.gather(1, order_TJ).tolist(), topk_weights_TJ.gather(1, order_TJ)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_topk", "sigmoid"])
def test_of_equal_scores_the_first_experts_are_taken(scoring: Scoring) -> None:
    logits_TX = torch.zeros(2, 20)
    logits_TX[1, 7] = 3.0
    ids, topk_weights_TJ = routed(logits_TX, RoutingRule(4, scoring, renormalise=True))
    assert ids == [[0, 1, 2, 3], [0, 1, 2, 7]]
    torch.testing.assert_close(topk_weights_TJ.sum(1), torch.ones(2))
    torch.testing.assert_close(topk_weights_TJ[0], torch.full((4,), 0.25))


def test_of_equal_groups_the_first_are_kept() -> None:
    """Equal scores within a group count as often as they occur."""
    assert routed(torch.zeros(1, 16), GROUPED)[0] == [[0, 1, 2, 3]]
    logits_TX = torch.full((1, 16), -2.0)
    logits_TX[0, 4:6] = 1.0  # twice the best score of groups 0 and 2
    logits_TX[0, [0, 8]] = 1.0
    assert routed(logits_TX, GROUPED)[0] == [[0, 1, 4, 5]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("rule", [RoutingRule(3, "softmax_of_topk"), RoutingRule(3, "softmax"), GROUPED])
def test_infinite_and_nan_logits_choose_distinct_experts(rule: RoutingRule) -> None:
    logits_TX = torch.zeros(4, 16)
    logits_TX[0] = -torch.inf
    logits_TX[1] = torch.nan
    logits_TX[2] = torch.full((16,), -1, dtype=torch.int32).view(torch.float32)  # the lowest NaN
    logits_TX[3, 5] = torch.inf
    for ids in routed(logits_TX, rule, torch.zeros(16))[0]:
        assert len(set(ids)) == rule.top_k
        assert all(0 <= number < 16 for number in ids)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_topk", "sigmoid"])
def test_chosen_weights_follow_the_reference(scoring: Scoring) -> None:
    """With a bias of the scores, the weights come from the scores without it."""
    generator = torch.Generator().manual_seed(1)
    logits_TX, bias_X = torch.randn(5, 24, generator=generator), torch.rand(24, generator=generator)
    rule = RoutingRule(6, scoring, scale=2.5)
    for bias in (None, bias_X):
        ids, topk_weights_TJ = routed(logits_TX, rule, bias)
        wanted_TJ, expected_TJ = route.reference(logits_TX, rule, bias)
        order_TJ = wanted_TJ.argsort(1)
        assert ids == wanted_TJ.gather(1, order_TJ).tolist()
        torch.testing.assert_close(topk_weights_TJ, expected_TJ.gather(1, order_TJ))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(24, 6), (128, 8), (1000, 3)])
def test_logits_of_16_bits_choose_as_in_float32(
    experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    """Many are equal, of both signs, or too small to be normal numbers."""
    generator = torch.Generator().manual_seed(1)
    logits_TX = torch.randint(-9, 3, (8, experts), generator=generator).to(dtype)
    logits_TX[2:4] -= 9
    logits_TX[4:6] *= 1e-7
    logits_TX[6:] = torch.randn(2, experts, generator=generator).to(dtype)
    for scoring in ("softmax", "softmax_of_topk"):
        rule = RoutingRule(top_k, scoring, renormalise, scale=2.5)
        # Of equal logits the first: a stable sort.
        wanted_TJ = logits_TX.float().sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        ids, topk_weights_TJ = routed(logits_TX, rule)
        assert ids == wanted_TJ.sort(1).values.tolist()
        expected_TJ = route.reference(logits_TX, rule)[1].sort(1).values
        torch.testing.assert_close(topk_weights_TJ.sort(1).values, expected_TJ)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_topk"])
def test_nan_of_16_bits_is_first(scoring: Scoring) -> None:
    logits_TX = torch.zeros(3, 20, dtype=torch.bfloat16)
    logits_TX[0, 9] = torch.nan
    logits_TX[1] = -1
    logits_TX[1, 3:] = -torch.inf
    logits_TX[2] = torch.full((20,), -1, dtype=torch.int16).view(torch.bfloat16)  # the lowest NaN
    ids, topk_weights_TJ = routed(logits_TX, RoutingRule(4, scoring))
    assert ids == [[0, 1, 2, 9], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert topk_weights_TJ[0].isnan().all() and topk_weights_TJ[2].isnan().all()
    torch.testing.assert_close(topk_weights_TJ[1], torch.tensor([1, 1, 1, 0]) / 3)
