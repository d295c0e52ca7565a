"""Nothing for Hopper runs on an AMD GPU, although torch gives some of these compute capability 9."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from atom_ops.ops.experts.experts import ExpertWeights, _has_grouped_gemm
from atom_ops.triton_impl.hardware import target
from parallel.peer_memory import _kind

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
GPU = torch.device("cuda", 0)


@pytest.fixture(params=[(9, 0), (9, 4), (9, 5)], ids=["MI200", "MI300", "MI350"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch for ROCm, with the capability that it gives a GPU."""
    from atom_ops.triton_impl.hardware import pdl
    from atom_ops.triton_impl.quantized import quantized_linear

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    remembered = (target.is_hopper, pdl.launch_options, quantized_linear._runs)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.mark.usefixtures("cached")
def test_no_path_for_hopper() -> None:
    from atom_ops.triton_impl.attention import attention, prompt_attention
    from atom_ops.triton_impl.experts import expert_quantized
    from atom_ops.triton_impl.hardware import pdl
    from atom_ops.triton_impl.quantized import four_bit, quantized_linear

    assert not target.is_hopper(GPU)
    assert pdl.launch_options(GPU) == {"PDL": False}
    assert not quantized_linear._runs(GPU, fp8=True) and not quantized_linear._runs(GPU, fp8=False)
    values: Any = type("Values", (), {"device": GPU, "is_meta": False})()
    if not target.INTERPRETED:
        assert not expert_quantized._has_fp8(values)
    assert not four_bit._has_ptx(values)
    x = torch.empty(2, 16, dtype=torch.bfloat16)
    assert not _has_grouped_gemm(x, ExpertWeights(x[None], x[None]))
    for float8 in (False, True):
        prefill = attention._prefill_config(4, 128, torch.bfloat16, float8)
        assert (prefill.tokens, prefill.stages) == (32, 1)
    assert prompt_attention._config(torch.bfloat16).stages == 1


@pytest.mark.usefixtures("cached")
def test_no_reduction_over_nvidias_peer_memory() -> None:
    assert _kind(2, 4096, torch.bfloat16, GPU) is None
