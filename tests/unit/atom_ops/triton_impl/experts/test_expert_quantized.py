"""The Triton kernels of `experts` for quantized weights, in Triton's interpreter: every format and plan."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atom_ops import ExpertWeights, backend, experts, triton_impl
from atom_ops.ops.experts.experts import ClampedSwiglu
from atom_ops.triton_impl.hardware import target
from atom_ops.weights import FourBitWords
from atom_ops.weights.four_bit_words import pack_words
from atom_ops.weights.samples import ROUNDED, Format, random_weight

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
CPU = torch.device("cpu")
GPT_OSS = ClampedSwiglu(7.0, 1.702)


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    triton_impl.load()
    backend.resolve(CPU, ["torch"])
    yield
    backend.resolve(CPU)


def layer(format: Format, count: int, hidden: int, features: int, biased: bool) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    biases = (torch.randn(count, 2 * features), torch.randn(count, hidden)) if biased else (None, None)
    gate_up = random_weight((count, 2 * features, hidden), format, torch.float32, generator)
    down = random_weight((count, hidden, features), format, torch.float32, generator)
    return ExpertWeights(gate_up, down, *biases)


SIZES: dict[Format, tuple[int, int]] = {
    "block_fp8": (208, 128),
    "channel_fp8": (144, 48),
    "channel_int8": (144, 48),
    "mxfp4": (160, 32),
    "int4_32_zeros": (160, 32),
    "int4_64": (192, 64),
}


def rounded_by_torch(values: Any, source: Any, target: Any, mode: Any, plain: Any) -> Any:
    """In place of the interpreter's conversion, which loses carries when it rounds to e4m3."""
    if target.name != "fp8e4nv":
        return plain(values, source, target, mode)
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def check(format: Format, plan: Any, tokens: int, described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    from atom_ops.triton_impl.experts.experts import _packed, multiply

    plain = interpreter._convert_float
    monkeypatch.setattr(interpreter, "_convert_float", lambda *args: rounded_by_torch(*args, plain))
    clamped = GPT_OSS if tokens % 2 else None
    weights = layer(format, 3, *SIZES[format], clamped is not None)
    torch.manual_seed(tokens)
    x = torch.randn(tokens, SIZES[format][0])
    ids, topk_weights = torch.rand(tokens, 3).topk(2).indices, torch.rand(tokens, 2)
    found = multiply(plan, *_packed(x, ids, topk_weights, weights, clamped), described)
    wanted = experts.reference(x, ids, topk_weights, weights, clamped)
    if hasattr(plan, "block") and format in ROUNDED:  # two GEMMs, each with rounded activations
        assert (found - wanted).norm() < (0.01 if format == "channel_int8" else 0.05) * wanted.norm()
    else:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", ["block_fp8", "channel_int8", "mxfp4", "int4_32_zeros"])
def test_few_tokens(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_ops.triton_impl.experts.expert_plans import MANY, VectorPlan, VectorTile

    plan = VectorPlan(MANY, VectorTile(32, 128, 4), VectorTile(32, 512, 4))
    check(format, plan, 2 if format == "block_fp8" else 1, False, monkeypatch)


@pytest.mark.parametrize(
    ("format", "kind"),
    [("block_fp8", "swapped"), ("block_fp8", "persistent"), ("channel_fp8", "plain"),
     ("channel_int8", "swapped"), ("mxfp4", "persistent"), ("mxfp4", "plain"), ("int4_64", "swapped")],
)  # fmt: skip
def test_many_tokens(format: Format, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the op's own cases leave out: rounding to e4m3, tensor descriptors, persistent programs."""
    from atom_ops.triton_impl.experts.expert_plans import MANY, GroupedPlan, GroupedTile

    tile = GroupedTile(64, 128, 4, 2, persistent=kind == "persistent")
    plan = GroupedPlan(MANY, 16 if kind == "swapped" else 64, tile, tile)
    check(format, plan, 10 if kind == "plain" else 9, kind != "plain", monkeypatch)


@pytest.mark.parametrize("inputs", [32, 96, 2880])
def test_packed_mxfp4_keeps_every_number(inputs: int) -> None:
    weight = random_weight((2, 8, inputs), "mxfp4", torch.float32, torch.Generator().manual_seed(3))
    packed = pack_words(weight)
    assert isinstance(packed, FourBitWords) and packed.shape == weight.shape
    for expert in range(2):
        assert torch.equal(
            packed.expert(expert).dequantized(torch.float32), weight.expert(expert).dequantized(torch.float32)
        )
