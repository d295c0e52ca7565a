"""Routing and experts, against transformers' own routers and expert modules."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from atom_ops import ClampedSwiglu, ExpertActivation, ExpertWeights, RoutingRule, experts, route
from atom_ops.ops.experts.experts import _dense_fallback

HIDDEN = 24


def _fill(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return module.eval()


def _config(model_type: str, **fields: Any) -> Any:
    made = AutoConfig.for_model(model_type, hidden_size=HIDDEN, **fields)
    made._experts_implementation = "eager"
    return made


_GROUPED = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
ROUTERS = {
    "qwen3": (
        Qwen3MoeTopKRouter,
        _config("qwen3_moe", num_experts=20, num_experts_per_tok=4, norm_topk_prob=True),
        RoutingRule(4, "softmax", renormalise=True),
    ),
    "qwen3-plain": (
        Qwen3MoeTopKRouter,
        _config("qwen3_moe", num_experts=20, num_experts_per_tok=4, norm_topk_prob=False),
        RoutingRule(4, "softmax"),
    ),
    "mixtral": (
        MixtralTopKRouter,
        _config("mixtral", num_local_experts=8, num_experts_per_tok=2),
        RoutingRule(2, "softmax", renormalise=True),
    ),
    "glm": (
        Glm4MoeTopkRouter,
        _config("glm4_moe", n_routed_experts=16, num_experts_per_tok=3, n_group=1, topk_group=1, **_GROUPED),
        RoutingRule(3, "sigmoid", renormalise=True, scale=2.5),
    ),
    "deepseek": (
        DeepseekV3TopkRouter,
        _config(
            "deepseek_v3", n_routed_experts=32, num_experts_per_tok=4, n_group=8, topk_group=3, **_GROUPED
        ),
        RoutingRule(4, "sigmoid", True, 2.5, groups=8, kept_groups=3),
    ),
    "gpt-oss": (
        GptOssTopKRouter,
        _config("gpt_oss", num_local_experts=12, num_experts_per_tok=4),
        RoutingRule(4, "softmax_of_topk"),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_routing_matches_transformers(name: str, ties: bool) -> None:
    kind, config, rule = ROUTERS[name]
    router = _fill(kind(config))
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    if ties:
        with torch.no_grad():
            router.weight[1::2] = router.weight[::2]
            for name_of_bias in ("bias", "e_score_correction_bias"):
                if (bias := getattr(router, name_of_bias, None)) is not None:
                    bias[1::2] = bias[::2]
    logits, weights, ids = router(x)
    rule.check(logits.shape[1])
    found_ids, found_weights = route(logits, rule, getattr(router, "e_score_correction_bias", None))
    assert found_ids.dtype == torch.int64 and found_weights.dtype == torch.float32
    chosen = torch.zeros_like(logits)
    torch.testing.assert_close(
        chosen.scatter(1, found_ids, found_weights), chosen.scatter(1, ids, weights), atol=1e-6, rtol=1e-6
    )


def test_the_correction_bias_affects_only_the_selection() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    ids, weights = route(logits, RoutingRule(2, "sigmoid"), bias)
    assert sorted(ids[0].tolist()) == [0, 3]
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids))


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = torch.randn(9, 16).bfloat16()
    for scoring in ("softmax", "sigmoid", "softmax_of_topk"):
        rule = RoutingRule(3, scoring, renormalise=True)
        for found, wanted in zip(route(logits, rule), route(logits.float(), rule), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
def test_nan_rows_get_valid_experts(scoring: Any) -> None:
    logits = torch.full((3, 8), float("nan"))
    ids, _ = route(logits, RoutingRule(2, scoring, groups=1), torch.ones(8))
    assert ids.min() >= 0 and ids.max() < 8


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RoutingRule(2, "sigmoid", groups=3), "8 experts do not form 3 groups"),
        (RoutingRule(2, "sigmoid", groups=8), "have no 2 each"),
        (RoutingRule(3, "sigmoid", groups=4), "cannot choose 3 of 8 experts"),
        (RoutingRule(9, "softmax"), "cannot choose 9 of 8 experts"),
    ],
)
def test_invalid_rules_are_refused(rule: RoutingRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule.check(8)
    with pytest.raises(ValueError, match="3 of 2 groups"):
        RoutingRule(1, "sigmoid", groups=2, kept_groups=3)


def _qwen3() -> tuple[torch.nn.Module, ExpertWeights, ExpertActivation]:
    config = _config("qwen3_moe", num_experts=12, moe_intermediate_size=10)
    module = _fill(Qwen3MoeExperts(config))
    return module, ExpertWeights(module.gate_up_proj.data, module.down_proj.data), None


def _gpt_oss() -> tuple[torch.nn.Module, ExpertWeights, ExpertActivation]:
    """Its gate and up are interleaved, its matrices transposed, and the numbers large enough to clamp."""
    module = _fill(GptOssExperts(_config("gpt_oss", num_local_experts=12, intermediate_size=10)))
    gate_up, bias = module.gate_up_proj.data.mul_(4).transpose(1, 2), module.gate_up_proj_bias.data
    weights = ExpertWeights(
        torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1),
        module.down_proj.data.transpose(1, 2).contiguous(),
        torch.cat([bias[:, ::2], bias[:, 1::2]], 1),
        module.down_proj_bias.data,
    )
    return module, weights, ClampedSwiglu(7.0, 1.702)


@pytest.mark.parametrize("made", [_qwen3, _gpt_oss])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_experts_match_transformers(made: Any, tokens: int) -> None:
    module, weights, activation = made()
    x, ids, topk_weights = _inputs(tokens, 12, 3)
    with torch.no_grad():
        wanted = module(x, ids, topk_weights)
    found = experts(x, ids, topk_weights, weights, activation)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
    everywhere = _dense_fallback(x, ids, topk_weights, weights, activation)
    torch.testing.assert_close(everywhere, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("made", [_qwen3, _gpt_oss])
@pytest.mark.parametrize("function", [experts, _dense_fallback])
def test_experts_of_other_ranks_add_nothing(made: Any, function: Any) -> None:
    """The sums over 3, 5 and 4 experts add up to that over all 12."""
    _, weights, activation = made()
    x, ids, topk_weights = _inputs(23, 12, 3)
    ids[-1] = -1  # a row of padding
    wanted = experts(x[:-1], ids[:-1], topk_weights[:-1], weights, activation)
    total = torch.zeros_like(x)
    for first, end in ((0, 3), (3, 8), (8, 12)):
        biases = (weights.gate_up_bias_XO, weights.down_bias_XD)
        some = [None if each is None else each[first:end] for each in biases]
        part = ExpertWeights(
            weights.gate_up_XOD[first:end], weights.down_XDF[first:end], *some, complete=False
        )
        total += function(x, ids - first, topk_weights, part, activation)
    assert not total[-1].any()
    torch.testing.assert_close(total[:-1], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [experts, _dense_fallback])
def test_padding_does_not_disturb_real_rows(function: Any) -> None:
    _, weights, activation = _gpt_oss()
    x, ids, topk_weights = _inputs(9, 12, 3)
    wanted = function(x[:6], ids[:6], topk_weights[:6], weights, activation)
    x[6:], topk_weights[6:] = float("nan"), float("nan")
    x[7] = float("inf")
    found = function(x, ids, topk_weights, weights, activation)
    torch.testing.assert_close(found[:6], wanted, atol=1e-5, rtol=1e-5)


def test_an_unselected_expert_adds_nothing_however_large() -> None:
    _, weights, activation = _qwen3()
    x, ids, topk_weights = _inputs(5, 6, 2)
    wanted = experts(x, ids, topk_weights, weights, activation)
    weights.down_XDF[7:] = float("inf")
    assert torch.equal(experts(x, ids, topk_weights, weights, activation), wanted)
    torch.testing.assert_close(_dense_fallback(x, ids, topk_weights, weights, activation), wanted)


def test_experts_are_summed_in_float32() -> None:
    """1 + 2^-9 four times: each sum of bfloat16 would drop the small part."""
    weights = ExpertWeights(torch.ones(4, 2, 1).bfloat16(), torch.ones(4, 1, 1).bfloat16())
    x = torch.tensor([[1.0]]).bfloat16()
    inner = functional.silu(x) * x
    found = experts(x, torch.arange(4)[None], torch.tensor([[1.0, 2**-9, 2**-9, 2**-9]]), weights)
    assert torch.equal(found, (inner.float() * (1 + 3 * 2**-9)).bfloat16())
    assert found > inner


def _inputs(tokens: int, count: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, count, generator=generator).topk(chosen).indices
    return x, ids, torch.rand(tokens, chosen, generator=generator)
