"""AITER's providers for quantized weights, on its model, against torch with equally rounded inputs."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from atom_ops import (
    ClampedSwiglu,
    ExpertRole,
    ExpertWeights,
    RoutingRule,
    add_norm_linear,
    backend,
    experts,
    linear,
    rms_norm,
    route,
    silu_and_mul,
    silu_and_mul_linear,
)  # fmt: skip
from atom_ops.op import REGISTRY
from atom_ops.ops.experts.experts import pack_expert_weight
from atom_ops.ops.linear.linear import pack_linear_weight
from atom_ops.weights import ChannelFP8, ShuffledFP8, ShuffledMXFP4, tensors_of
from atom_ops.weights.samples import Format, random_weight
from tests.aiter_contract.package import Swap, install
from tests.helpers.kernels.op_cases import CPU, changed
from tests.helpers.kernels.rounded import rounded_linear
from tests.helpers.parallel.signatures import in_development, published

SIGNATURES = {"published": published(), "in development": published() | in_development()}
GPUS = ("gfx942", "gfx950")
LINEAR_CALLS = {
    "block_fp8": {"gemm_a8w8_blockscale_bpreshuffle", "ops.quant.per_group_quant_hip",
                  "ops.shuffle.shuffle_weight"},
    "channel_fp8": {"gemm_a8w8_bpreshuffle", "ops.quant.per_token_quant_hip", "ops.shuffle.shuffle_weight"},
    "static_fp8": {"gemm_a8w8_bpreshuffle", "ops.quant.per_tensor_quant_hip", "ops.shuffle.shuffle_weight"},
    "channel_int8": {"gemm_a8w8", "ops.quant.per_token_quant_hip"},
    "mxfp4": {"gemm_a4w4", "ops.quant.per_1x32_f4_quant_hip", "ops.shuffle.shuffle_weight",
              "utility.fp4_utils.e8m0_shuffle"},
}  # fmt: skip
GPT_OSS = ClampedSwiglu(7.0, 1.702)

Install = Callable[..., Counter[str]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install`, and torch's `linear` with rounding, with the test's monkeypatch."""

    def install_and_resolve(
        gpu: str = "gfx942", name: str = "published", swap: Swap | None = None, round_mxfp4: bool = True
    ) -> Counter[str]:
        calls = install(monkeypatch, SIGNATURES[name], swap, gpu)
        monkeypatch.setattr(REGISTRY["linear"], "reference", rounded_linear(round_mxfp4))
        backend.resolve(CPU)
        return calls

    yield install_and_resolve
    monkeypatch.undo()
    backend.resolve(CPU)


def formats() -> Iterator[tuple[str, Format]]:
    yield from (
        (gpu, format) for gpu in GPUS for format in LINEAR_CALLS if gpu == "gfx950" or format != "mxfp4"
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def check_linear(shape: tuple[int, int], format: Format, tokens: int = 37, with_bias: bool = True) -> None:
    weight = random_weight(shape, format, torch.float32, generator())
    x = torch.randn(tokens, shape[1], generator=generator())
    bias = torch.randn(shape[0], generator=generator()) if with_bias else None
    found = linear(x, pack_linear_weight(weight), bias)
    torch.testing.assert_close(found, linear.reference(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("gpu", "format"), list(formats()))
def test_linear(gpu: str, format: Format, installed: Install) -> None:
    calls = installed(gpu)
    check_linear((320, 512), format)
    check_linear((64, 256), format, tokens=1, with_bias=False)
    check_linear((64, 256), format, tokens=0)
    assert {name.removeprefix("aiter.") for name in calls} == LINEAR_CALLS[format]


@pytest.mark.parametrize("gpu", GPUS)
def test_blocks_without_whole_tiles(gpu: str, installed: Install) -> None:
    calls = installed(gpu)
    check_linear((200, 256), "block_fp8")
    assert calls["aiter.gemm_a8w8_blockscale"] == 1


def test_the_next_release_makes_the_result_of_mxfp4_itself(installed: Install) -> None:
    calls = installed("gfx950", "in development")
    check_linear((320, 512), "mxfp4")
    assert calls["aiter.gemm_a4w4"] == 1


def test_bound_of_inputs(installed: Install) -> None:
    installed()
    weight = random_weight((64, 128), "channel_fp8", torch.float32, generator())
    assert isinstance(weight, ChannelFP8)
    weight = replace(weight, input_bound=1.5)
    x = torch.randn(9, 128, generator=generator())
    found, wanted = linear(x, pack_linear_weight(weight)), linear.reference(x, weight)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (wanted - linear.reference(x, replace(weight, input_bound=None))).abs().max() > 0.1


@pytest.mark.parametrize(
    ("gpu", "shape", "format"),
    [
        ("gfx942", (64, 256), "mxfp4"), ("gfx950", (64, 128), "mxfp4"), ("gfx950", (48, 256), "mxfp4"),
        ("gfx942", (64, 192), "block_fp8"), ("gfx942", (20, 256), "block_fp8"),
        ("gfx942", (24, 256), "channel_fp8"), ("gfx942", (20, 64), "channel_int8"),
        ("gfx942", (64, 256), "int4_32"),
    ],
)  # fmt: skip
def test_sizes_and_types_that_it_leaves_to_torch(
    gpu: str, shape: tuple[int, int], format: Format, installed: Install
) -> None:
    calls = installed(gpu)
    weight = random_weight(shape, format, torch.float32, generator())
    packed = pack_linear_weight(weight)
    assert packed is weight
    linear(torch.randn(3, shape[1]), packed)
    assert not calls.keys() - {"aiter.tuned_gemm.tgemm.mm"} and REGISTRY["linear"].ran_reference


NORMS = {
    "block_fp8": "aiter.ops.triton.fused_fp8_quant.fused_rms_fp8_group_quant",
    "channel_fp8": "aiter.rmsnorm2d_fwd_with_add_dynamicquant",
    "mxfp4": "aiter.ops.triton.fused_mxfp4_quant.fused_rms_mxfp4_quant",
}
GATES = {
    "block_fp8": "aiter.ops.triton.activation.act_mul_and_fp8_group_quant",
    "static_fp8": "aiter.scaled_silu_and_mul",
    "mxfp4": "aiter.ops.triton.activation.act_mul_and_mxfp4_quant",
}


def check_norm(format: Format, with_residual: bool = True) -> None:
    draw = generator()
    weight = random_weight((320, 512), format, torch.float32, draw)
    x, residual = torch.randn(2, 9, 512, generator=draw)
    norm, bias = torch.rand(512, generator=draw), torch.randn(320, generator=draw)
    given = residual if with_residual else None
    found = add_norm_linear(x, given, norm, 1e-5, pack_linear_weight(weight), bias)
    total = x + residual if with_residual else x
    wanted = linear.reference(rms_norm.reference(total, norm, 1e-5), weight, bias)
    torch.testing.assert_close(found, (wanted, total), atol=1e-5, rtol=1e-5)


def check_gate(format: Format) -> None:
    draw = generator()
    weight = random_weight((320, 512), format, torch.float32, draw)
    x, bias = torch.randn(9, 1024, generator=draw), torch.randn(320, generator=draw)
    found = silu_and_mul_linear(x, pack_linear_weight(weight), bias)
    wanted = linear.reference(silu_and_mul.reference(x), weight, bias)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("gpu", "format"), [each for each in formats() if each[1] in NORMS])
def test_norms_that_round(gpu: str, format: Format, installed: Install) -> None:
    calls = installed(gpu)
    check_norm(format)
    assert calls[NORMS[format]] == 1 and not any("quant_hip" in name for name in calls)
    check_norm(format, with_residual=False)
    assert not any("quant_hip" in name for name in calls)


@pytest.mark.parametrize(("gpu", "format"), [each for each in formats() if each[1] in GATES])
def test_gated_activations_that_round(gpu: str, format: Format, installed: Install) -> None:
    calls = installed(gpu)
    check_gate(format)
    assert calls[GATES[format]] == 1 and not any("quant_hip" in name for name in calls)


@pytest.mark.parametrize("format", ["static_fp8", "channel_int8", "plain"])
def test_norms_of_other_types_are_kernels_of_their_own(format: Format, installed: Install) -> None:
    calls = installed()
    check_norm(format)
    assert calls["aiter.rmsnorm2d_fwd_with_add"] == 1


def check_route(rule: RoutingRule, with_bias: bool = False) -> None:
    logits = torch.stack([torch.randperm(64, generator=generator()) for _ in range(9)]) / 8 - 4
    logits = torch.stack([row.roll(3 * number) for number, row in enumerate(logits)])
    bias = torch.rand(64, generator=generator()) if with_bias else None
    found, wanted = route(logits, rule, bias), route.reference(logits, rule, bias)
    order, expected = found[0].argsort(-1), wanted[0].argsort(-1)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.gather(1, order), theirs.gather(1, expected))


ROUTES = [
    (RoutingRule(8, "softmax", renormalise=True), False, "topk_softmax"),
    (RoutingRule(4, "softmax"), False, "topk_softmax"),
    (RoutingRule(4, "softmax_of_topk"), False, "topk_softmax"),
    (RoutingRule(6, "softmax", scale=16.0, groups=8, kept_groups=3, group_best=1), False, "grouped_topk"),
    (RoutingRule(6, "sigmoid", renormalise=True, scale=2.5), False, "grouped_topk"),
    (RoutingRule(8, "sigmoid", True, 2.5, groups=8, kept_groups=4), True, "biased_grouped_topk"),
    (RoutingRule(8, "sigmoid", True, 2.5), True, "biased_grouped_topk"),
    (RoutingRule(8, "sigmoid", False, 2.5), True, None),
    (RoutingRule(6, "softmax", scale=2.0), False, None),
    (RoutingRule(6, "sigmoid", groups=8, kept_groups=4), False, None),
    (RoutingRule(6, "softmax", groups=16, kept_groups=4, group_best=1), False, None),
    (RoutingRule(4, "softmax_of_topk"), True, None),
]


@pytest.mark.parametrize(("rule", "with_bias", "function"), ROUTES)
def test_routing(rule: RoutingRule, with_bias: bool, function: str | None, installed: Install) -> None:
    calls = installed()
    check_route(rule, with_bias)
    assert set(calls) == ({f"aiter.{function}"} if function else set())


EXPERT_SHAPES = {
    "block_fp8": (256, 128),
    "channel_fp8": (128, 384),
    "static_fp8": (128, 128),
    "mxfp4": (320, 96),
}


def check_experts(format: Format, activation: ClampedSwiglu | None, first: int | None) -> None:
    (hidden, features), count, draw = EXPERT_SHAPES[format], 5, generator()
    biases = (torch.randn(count, 2 * features, generator=draw), torch.randn(count, hidden, generator=draw))
    shapes = (count, 2 * features, hidden), (count, hidden, features)
    matrices = [random_weight(shape, format, torch.float32, draw) for shape in shapes]
    weights = ExpertWeights(
        *matrices,
        *(biases if activation else (None, None)),
        first is None,
    )
    x = torch.randn(11, hidden, generator=draw)
    ids = torch.stack([torch.randperm(count, generator=draw)[:3] for _ in x]) - (first or 0)
    topk_weights = torch.rand(11, 3, generator=draw)
    packed = replace(
        weights,
        gate_up_XOD=pack_expert_weight(weights.gate_up_XOD, ExpertRole(False, activation, bool(activation))),
        down_XDF=pack_expert_weight(weights.down_XDF, ExpertRole(True, activation, bool(activation))),
    )
    if format == "static_fp8":  # each token has a scale of its own instead
        weights = ExpertWeights(
            *(replace(each, input_scale=None) for each in matrices), None, None, first is None
        )
    found = experts(x, ids, topk_weights, packed, activation)
    wanted = experts.reference(x, ids, topk_weights, weights, activation)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert not len(experts(x[:0], ids[:0], topk_weights[:0], packed, activation))


@pytest.mark.parametrize("first", [None, 2])
@pytest.mark.parametrize(("gpu", "format"), [each for each in formats() if each[1] in EXPERT_SHAPES])
def test_experts(gpu: str, format: Format, first: int | None, installed: Install) -> None:
    calls = installed(gpu)
    check_experts(format, None, first)
    assert calls["aiter.fused_moe.fused_moe"] == 1 and not REGISTRY["experts"].ran_reference


@pytest.mark.parametrize("first", [None, 2])
def test_experts_of_gpt_oss(first: int | None, installed: Install) -> None:
    calls = installed("gfx950", round_mxfp4=False)
    check_experts("mxfp4", GPT_OSS, first)
    assert calls["aiter.fused_moe.fused_moe"] == 1
    assert (
        calls["aiter.ops.shuffle.shuffle_weight_a16w4"] == calls["aiter.ops.shuffle.shuffle_scale_a16w4"] == 2
    )


@pytest.mark.parametrize(
    ("gpu", "format", "shape", "role"),
    [
        ("gfx942", "mxfp4", (3, 512, 256), ExpertRole(False)),
        ("gfx950", "mxfp4", (3, 512, 256), ExpertRole(False, ClampedSwiglu(5.0, 1.702), True)),
        ("gfx950", "mxfp4", (3, 512, 256), ExpertRole(False, None, True)),
        ("gfx942", "block_fp8", (3, 192, 256), ExpertRole(False)),
        ("gfx942", "channel_fp8", (3, 256, 64), ExpertRole(True)),
        ("gfx942", "channel_fp8", (3, 256, 128), ExpertRole(True, GPT_OSS, True)),
        ("gfx942", "channel_int8", (3, 256, 128), ExpertRole(True)),
    ],
)  # fmt: skip
def test_experts_that_it_leaves_to_torch(
    gpu: str, format: Format, shape: tuple[int, ...], role: ExpertRole, installed: Install
) -> None:
    installed(gpu)
    weight = random_weight(shape, format, torch.float32, generator())
    assert pack_expert_weight(weight, role) is weight


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("format", "shape", "role"),
    [
        ("block_fp8", (3, 256, 128), ExpertRole(False)), ("channel_fp8", (3, 128, 256), ExpertRole(True)),
        ("mxfp4", (3, 192, 320), ExpertRole(False)), ("mxfp4", (3, 320, 96), ExpertRole(True)),
        ("mxfp4", (3, 192, 320), ExpertRole(False, GPT_OSS, True)),
        ("mxfp4", (3, 320, 96), ExpertRole(True, GPT_OSS, True)),
        ("block_fp8", (272, 256), None), ("channel_fp8", (48, 64), None), ("mxfp4", (96, 512), None),
    ],
)  # fmt: skip
def test_packed_weights_are_readable(
    gpu: str, format: Format, shape: tuple[int, ...], role: ExpertRole | None, installed: Install
) -> None:
    """By the reference, which runs where activations have a dtype that AITER does not take."""
    installed(gpu)
    if format == "mxfp4" and gpu == "gfx942":
        return
    weight = random_weight(shape, format, torch.float32, generator())
    packed = pack_linear_weight(weight) if role is None else pack_expert_weight(weight, role)
    assert isinstance(packed, ShuffledFP8 | ShuffledMXFP4) and packed.shape == shape
    assert not isinstance(weight, torch.Tensor)
    if role is None:
        x = torch.randn(3, shape[1], dtype=torch.float64)
        assert torch.equal(packed.dequantized(torch.float32), weight.dequantized(torch.float32))
        torch.testing.assert_close(linear(x, packed), x @ weight.dequantized(torch.float64).T)
    else:
        for number in range(shape[0]):
            found, wanted = packed.expert(number), weight.expert(number)
            assert torch.equal(found.dequantized(torch.float32), wanted.dequantized(torch.float32))


@pytest.mark.parametrize("format", ["block_fp8", "static_fp8", "mxfp4"])
def test_packed_weights_are_planned(format: Format, installed: Install) -> None:
    """Weights on the meta device, by which memory is planned, become as large as those in memory."""
    installed("gfx950" if format == "mxfp4" else "gfx942")
    matrix = random_weight((320, 512), format, torch.float32, generator())
    stack = random_weight((2, 512, 384), format, torch.float32, generator())
    for weight, role in ((matrix, None), (stack, ExpertRole(False)), (stack, ExpertRole(True))):
        planned = changed(weight, lambda tensor: tensor.to("meta"))
        packed = [
            pack_linear_weight(each) if role is None else pack_expert_weight(each, role)
            for each in (weight, planned)
        ]
        sizes = [[(each.shape, each.dtype) for each in tensors_of(one)] for one in packed]
        assert sizes[0] == sizes[1] and isinstance(packed[0], ShuffledFP8 | ShuffledMXFP4)


def test_nan_in_a_weight_is_refused_on_an_mi300(installed: Install) -> None:
    weight = random_weight((64, 256), "channel_fp8", torch.float32, generator())
    assert isinstance(weight, ChannelFP8)
    weight.values.view(torch.uint8)[3, 5] = 0x7F
    installed("gfx950")
    pack_linear_weight(weight)
    installed("gfx942")
    with pytest.raises(ValueError, match="has NaN"):
        pack_linear_weight(weight)


_QUANT, _MOE = "aiter.ops.quant.", "aiter.fused_moe.fused_moe"
# A format of `linear`, or of `experts`, and swaps of two arguments of a function that it calls.
SWAPS: list[tuple[str, Format, Swap]] = [
    ("linear", "channel_int8", ("aiter.gemm_a8w8", "XQ", "WQ")),
    ("linear", "channel_int8", ("aiter.gemm_a8w8", "x_scale", "w_scale")),
    ("linear", "channel_int8", (f"{_QUANT}per_token_quant_hip", "x", "quant_dtype")),
    ("linear", "channel_fp8", ("aiter.gemm_a8w8_bpreshuffle", "XQ", "WQ")),
    ("linear", "channel_fp8", ("aiter.gemm_a8w8_bpreshuffle", "x_scale", "w_scale")),
    ("linear", "static_fp8", (f"{_QUANT}per_tensor_quant_hip", "x", "scale")),
    ("linear", "block_fp8", ("aiter.gemm_a8w8_blockscale_bpreshuffle", "XQ", "WQ")),
    ("linear", "block_fp8", ("aiter.gemm_a8w8_blockscale_bpreshuffle", "x_scale", "w_scale")),
    ("linear", "block_fp8", (f"{_QUANT}per_group_quant_hip", "group_size", "transpose_scale")),
    ("blocks", "block_fp8", ("aiter.gemm_a8w8_blockscale", "XQ", "WQ")),
    ("blocks", "block_fp8", ("aiter.gemm_a8w8_blockscale", "x_scale", "w_scale")),
    ("linear", "mxfp4", ("aiter.gemm_a4w4", "A", "B")),
    ("linear", "mxfp4", ("aiter.gemm_a4w4", "A_scale", "B_scale")),
    ("linear", "mxfp4", ("aiter.gemm_a4w4", "out", "bpreshuffle")),
    ("linear", "mxfp4", (f"{_QUANT}per_1x32_f4_quant_hip", "quant_dtype", "shuffle")),
    ("experts", "block_fp8", (_MOE, "w1_scale", "w2_scale")),
    ("experts", "channel_fp8", (_MOE, "w1", "w1_scale")),
    ("experts", "channel_fp8", (_MOE, "w1", "w2")),
    ("experts", "mxfp4", (_MOE, "w1_scale", "w2_scale")),
    ("experts", "mxfp4", (_MOE, "hidden_pad", "intermediate_pad")),
    ("gpt_oss", "mxfp4", (_MOE, "hidden_pad", "intermediate_pad")),
    ("gpt_oss", "mxfp4", (_MOE, "bias1", "bias2")),
    ("gpt_oss", "mxfp4", (_MOE, "activation", "quant_type")),
    ("gpt_oss", "mxfp4", ("aiter.ops.shuffle.shuffle_weight_a16w4", "NLane", "gate_up")),
    ("gpt_oss", "mxfp4", ("aiter.ops.shuffle.shuffle_scale_a16w4", "experts_cnt", "gate_up")),
    *(
        ("norm", "block_fp8", (NORMS["block_fp8"], *pair))
        for pair in (("inp1", "inp1_weight"), ("group_size", "transpose_scale"))
    ),
    *(
        ("norm", "channel_fp8", (NORMS["channel_fp8"], *pair))
        for pair in (("out", "residual_out"), ("yscale", "out"), ("input", "weight"))
    ),
    ("norm alone", "channel_fp8", ("aiter.rmsnorm2d_fwd_with_dynamicquant", "out", "yscale")),
    ("norm", "mxfp4", (NORMS["mxfp4"], "x1", "x1_weight")),
    ("norm", "mxfp4", (NORMS["mxfp4"], "x1_epsilon", "shuffle")),
    ("gate", "block_fp8", (GATES["block_fp8"], "group_size", "dtype_quant")),
    ("gate", "static_fp8", (GATES["static_fp8"], "input", "out")),
    ("gate", "mxfp4", (GATES["mxfp4"], "activation", "shuffle")),
    ("triton", "mxfp4", ("aiter.ops.triton.gemm_afp4wfp4.gemm_afp4wfp4", "x_scales", "w_scales")),
    ("triton", "mxfp4", ("aiter.ops.triton.gemm_afp4wfp4.gemm_afp4wfp4", "x", "w")),
    ("softmax", "plain", ("aiter.topk_softmax", "topk_weights", "topk_indices")),
    ("softmax", "plain", ("aiter.topk_softmax", "token_expert_indices", "topk_indices")),
    ("grouped", "plain", ("aiter.grouped_topk", "num_expert_group", "topk_group")),
    ("grouped", "plain", ("aiter.grouped_topk", "need_renorm", "is_softmax")),
    ("biased", "plain", ("aiter.biased_grouped_topk", "num_expert_group", "topk_group")),
    ("biased", "plain", ("aiter.biased_grouped_topk", "gating_output", "correction_bias")),
]


@pytest.mark.parametrize(("what", "format", "swap"), SWAPS)
def test_a_swap_of_two_arguments_is_found(what: str, format: Format, swap: Swap, installed: Install) -> None:
    calls = installed("gfx950", swap=swap, round_mxfp4=what != "gpt_oss")
    checks: dict[str, Callable[[], None]] = {
        "linear": lambda: check_linear((320, 512), format, with_bias=False),
        "triton": lambda: check_linear((320, 512), format, with_bias=False),
        "blocks": lambda: check_linear((200, 256), format),
        "experts": lambda: check_experts(format, None, 2),
        "gpt_oss": lambda: check_experts(format, GPT_OSS, 2),
        "norm": lambda: check_norm(format),
        "norm alone": lambda: check_norm(format, with_residual=False),
        "gate": lambda: check_gate(format),
        "softmax": lambda: check_route(*ROUTES[0][:2]),
        "grouped": lambda: check_route(*ROUTES[3][:2]),
        "biased": lambda: check_route(*ROUTES[5][:2]),
    }
    if what == "triton":
        backend.resolve(CPU, preferred=("aiter_triton",))
    with pytest.raises((AssertionError, AttributeError, TypeError, RuntimeError)):
        checks[what]()
    assert calls[swap[0]] > 0
