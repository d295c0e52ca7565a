"""Checkpoints in every quantized format: logits equal those of the dequantized numbers, on 1 and 2 ranks."""

from pathlib import Path

import pytest
import torch

from parallel.communicator import Communicator
from tests.helpers.checkpoints.four_bits import FOUR_BIT_FORMATS, FOUR_BIT_MODELS
from tests.helpers.checkpoints.fp8 import FP8_MODELS
from tests.helpers.checkpoints.quantized_formats import (
    FORMATS,
    OTHER_FAMILIES,
    QUANTIZED_MODELS,
    StoredFormat,
    save_quantized,
)
from tests.helpers.checkpoints.tiny_models import Tiny, hf_logits, prompt_of
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks

IDS = prompt_of(40, seed=4)
# Every kind of weight on every kind of layer; `make test-models` runs all others too.
ALWAYS = {
    ("qwen3-moe", "compressed-tensors, tensor"), ("qwen3-moe", "compressed-tensors, INT8"),
    ("qwen3-moe", "modelopt FP8_PB_WO"), ("deepseek-v3", "compressed-tensors, channel"),
    ("llama", "fbgemm_fp8"), ("qwen3-moe", "gptq, 32, desc_act"), ("llama", "awq, 64"),
    ("deepseek-v3", "pack-quantized, 32"), ("gpt-oss", "mxfp4-pack-quantized"),
    ("qwen3-moe", "modelopt NVFP4"),
}  # fmt: skip
OF_OTHERS = [
    each
    for each in FORMATS + FOUR_BIT_FORMATS
    if each.name in ("fp8, blocks", "gptq, 32, desc_act", "awq, 64")
]
"""The formats of other families, whose layers are those of the above."""
TABLES = (
    (QUANTIZED_MODELS, FORMATS), (FOUR_BIT_MODELS, FOUR_BIT_FORMATS), (OTHER_FAMILIES, OF_OTHERS),
)  # fmt: skip
ROWS = [
    pytest.param(model, format, id=f"{model.name}-{format.name}",
                 marks=() if (model.name, format.name) in ALWAYS else pytest.mark.models)
    for models, formats in TABLES
    for model in models
    for format in formats
]  # fmt: skip


def logits(directory: Path, size: int) -> list[torch.Tensor]:
    """Logits of every position, on each rank."""

    def run(tp: Communicator) -> torch.Tensor:
        ours = TinyWorker(directory, tp=tp)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [25, 15])

    return on_ranks(size, run)


@pytest.mark.parametrize(("model", "format"), ROWS)
def test_logits_equal_those_of_the_dequantized_numbers(
    tmp_path: Path, model: Tiny, format: StoredFormat, caplog: pytest.LogCaptureFixture
) -> None:
    expected = hf_logits(save_quantized(model, format, tmp_path), IDS)
    assert expected.std() > 0.5
    near = 3e-3 if format.scheme.startswith(("INT", "NVFP4")) else 1e-4  # activations are rounded to 16 bits
    with caplog.at_level("INFO", "atom"):
        (alone,) = logits(tmp_path, 1)
    torch.testing.assert_close(alone, expected, atol=near, rtol=1e-4)
    assert any(line.startswith(f"quantization: layers in {format.scheme}: ") for line in caplog.messages)
    for found in logits(tmp_path, 2):
        torch.testing.assert_close(found, expected, atol=near, rtol=1e-4)


def test_the_models_are_those_of_the_page() -> None:
    assert {model.name for model in FP8_MODELS} - {"qwen3"} < {model.name for model in QUANTIZED_MODELS}
    assert [model.name for model in QUANTIZED_MODELS] == [model.name for model in FOUR_BIT_MODELS]
    names = {model.name for model in QUANTIZED_MODELS}, {each.name for each in FORMATS + FOUR_BIT_FORMATS}
    assert all(model in names[0] and format in names[1] for model, format in ALWAYS)
    assert len(OF_OTHERS) == 3
