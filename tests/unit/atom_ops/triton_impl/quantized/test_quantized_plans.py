"""Which kernel multiplies by a quantized weight on a GPU, and what runs in the same kernel."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atom_ops.triton_impl.hardware import target
from atom_ops.triton_impl.quantized import known_plans, library, quantized_linear
from atom_ops.triton_impl.quantized.quantized_call import Packed
from atom_ops.triton_impl.quantized.quantized_plans import LibraryPlan
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords

pytestmark = pytest.mark.skipif(target.INTERPRETED, reason="the interpreter has plans of its own")

OUTPUTS, INPUTS = 4096, 12288
GPU = "cuda:0"
CACHES = (
    target.is_hopper,
    library._scales_blocks,
    quantized_linear._runs,
    known_plans._all_plans,
    known_plans.plans_on,
)


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    """Tensors of a GPU without one."""
    for function in CACHES:
        function.cache_clear()
    with FakeTensorMode():
        yield
    for function in CACHES:
        function.cache_clear()


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)


def weight_of(format: str) -> Packed:
    e4m3 = empty(OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn)
    of_outputs = empty(OUTPUTS, dtype=torch.float32)
    if format == "fp8-block":
        return BlockFP8(e4m3, empty(OUTPUTS // 128, INPUTS // 128, dtype=torch.float32), (128, 128))
    if format == "fp8-channel":
        return ChannelFP8(e4m3, of_outputs)
    if format == "int8-channel":
        return ChannelINT8(empty(OUTPUTS, INPUTS, dtype=torch.int8), of_outputs)
    words = empty(OUTPUTS, INPUTS // 4, dtype=torch.int16)
    if format == "mxfp4":
        return FourBitWords(words, empty(OUTPUTS, INPUTS // 128, dtype=torch.int32), None, INPUTS)
    zeros = empty(OUTPUTS, INPUTS // 128, dtype=torch.uint8) if format == "int4-zeros" else None
    return FourBitWords(words, empty(OUTPUTS, INPUTS // 128, dtype=torch.bfloat16), zeros, INPUTS)


def chosen(format: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """The class of the plan; with "+" where it fuses the norm, or the gated activation, before."""
    weight, x = weight_of(format), empty(tokens, INPUTS, dtype=dtype)
    plan = quantized_linear.plan_of(x, weight, dtype)
    norm = "norm+" if quantized_linear.plan_with_norm(x, weight) else ""
    gate = "gate+" if quantized_linear.plan_with_gate(x, weight) else ""
    return f"{norm}{gate}{type(plan).__name__}"


TOKENS = (1, 2, 16, 64, 300)
BOTH = "norm+gate+GemmPlan"
ON_H200 = {
    "fp8-block": ("gate+PersistentGemvPlan", BOTH, BOTH, "norm+gate+FP8StreamKPlan", "norm+gate+LibraryPlan"),
    "fp8-channel": (BOTH, BOTH, BOTH, BOTH, "norm+gate+LibraryPlan"),
    "int8-channel": (BOTH, BOTH, BOTH, BOTH, BOTH),
    "int4-128": ("norm+gate+RingPlan", "MmaPlan", "WgmmaPlan", "WgmmaPlan", "LibraryPlan"),
    "int4-zeros": ("MmaPlan", "MmaPlan", "GemmPlan", "GemmPlan", "LibraryPlan"),
    "mxfp4": ("MmaPlan", "MmaPlan", "WgmmaPlan", "WgmmaPlan", "LibraryPlan"),
}
FEW_BITS = ("GemvPlan", "GemmPlan", "GemmPlan", "GemmPlan", "LibraryPlan")
ON_L40S = {
    "fp8-block": ("GemvPlan", BOTH, BOTH, BOTH, BOTH),
    "fp8-channel": ("GemvPlan", BOTH, BOTH, BOTH, "norm+gate+LibraryPlan"),
    "int8-channel": ("GemvPlan", BOTH, BOTH, BOTH, BOTH),
    "int4-128": FEW_BITS,
    "int4-zeros": FEW_BITS,
    "mxfp4": FEW_BITS,
}


@pytest.mark.parametrize("format", ON_H200)
def test_on_an_h200(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA H200", (9, 0))
    assert tuple(chosen(format, tokens) for tokens in TOKENS) == ON_H200[format]


@pytest.mark.parametrize("format", ["int4-128", "int4-zeros", "mxfp4"])
def test_kernels_for_bfloat16_take_no_float16(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA H200", (9, 0))
    assert tuple(chosen(format, tokens, torch.float16) for tokens in TOKENS) == FEW_BITS


def test_the_library_for_e4m3_gives_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the activations were before they were quantized."""
    gpu(monkeypatch, "NVIDIA H200", (9, 0))
    x = empty(300, INPUTS, dtype=torch.float16)
    for format in ("fp8-block", "fp8-channel"):
        assert chosen(format, 300, torch.float16) == BOTH
        assert isinstance(quantized_linear.plan_of(x, weight_of(format), torch.bfloat16), LibraryPlan)


@pytest.mark.parametrize("format", ON_L40S)
def test_without_hopper(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA L40S", (8, 9))
    assert tuple(chosen(format, tokens) for tokens in TOKENS) == ON_L40S[format]


def test_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 needs conversions in hardware; no kernel takes float32."""
    gpu(monkeypatch, "NVIDIA A100", (8, 0))
    x = empty(1, INPUTS, dtype=torch.bfloat16)
    assert not quantized_linear.supports(weight_of("fp8-block"), x)
    assert quantized_linear.supports(weight_of("mxfp4"), x)
    for other in (empty(1, INPUTS, dtype=torch.float32), empty(0, INPUTS, dtype=torch.bfloat16)):
        assert not quantized_linear.supports(weight_of("mxfp4"), other)
