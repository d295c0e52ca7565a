"""What is registered in a host is what `make test-vllm` and `make test-sglang` run there."""

from collections.abc import Iterable
from typing import Any

import pytest

from atom.plugin.families import SGLANG, VLLM, HostFamilies
from tests.sglang import cases as sglang
from tests.vllm import cases as vllm
from workers.checkpoint.families import architectures

_NOT_RUN = {"GptOssForCausalLM"}
"""SGLang's attention for it is for GPUs alone."""


def _run(cases: Iterable[Any], attention: str) -> set[str]:
    return {architectures()[case.row.model_type][0] for case in cases if case.attention == attention}


def test_vllm_gets_what_was_run() -> None:
    assert set(VLLM.replaced(own_attention=True)) == _run(vllm.FAMILIES, vllm.OWN)
    assert set(VLLM.replaced(own_attention=False)) == _run(vllm.FAMILIES, vllm.HOST)


def test_sglang_gets_what_was_run() -> None:
    assert set(SGLANG.replaced(own_attention=True)) == _run(sglang.FAMILIES, sglang.OWN)
    assert set(SGLANG.replaced(own_attention=False)) - _NOT_RUN == _run(sglang.FAMILIES, sglang.HOST)


@pytest.mark.parametrize("host", [VLLM, SGLANG])
def test_models_of_images_are_the_host_s_own(host: HostFamilies) -> None:
    assert not [name for name in host.replaced(own_attention=True) if "ConditionalGeneration" in name]
