"""Checkpoints that compressed-tensors itself writes: `make test-formats` installs the library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.checkpoints.four_bits import FOUR_BIT_MODELS
from tests.helpers.checkpoints.quantized_formats import QUANTIZED_MODELS
from tests.helpers.checkpoints.tiny_models import Tiny, hf_logits, prompt_of, save_tiny
from tests.models.test_quantized import logits

quantization = pytest.importorskip("compressed_tensors.quantization", reason="make test-formats installs it")

IDS = prompt_of(40, seed=4)
PRESETS = {
    "FP8": "FP8 per tensor with static inputs",
    "FP8_DYNAMIC": "FP8 per channel",
    "FP8_BLOCK": "FP8 in blocks of 128 x 128",
    "W8A8": "INT8 per channel",
    "NVFP4A16": "NVFP4",
}
DENSE, OF_WHOLE_GROUPS = QUANTIZED_MODELS[0], FOUR_BIT_MODELS[0]


def calibrate(model: nn.Module, block: int = 128) -> None:
    """Set the scales of all quantized modules by the largest magnitudes of their weights."""
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        weight, args = module.weight.detach().float(), scheme.weights
        if args.strategy == "tensor_group":
            calibrate_groups(module, weight, args)
            continue
        if args.strategy == "block":
            rows, columns = (-(-size // block) * block for size in weight.shape)
            padded = nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
            largest = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).abs().amax((1, 3))
        else:
            largest = weight.abs().amax(1, keepdim=True)
            largest = largest if args.strategy == "channel" else largest.amax()
        scale, _ = quantization.utils.calculate_qparams(-largest, largest, args)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)


def calibrate_groups(module: nn.Module, weight: torch.Tensor, args: Any) -> None:
    """Set the scales of groups, and the one of the whole matrix, as NVFP4 has them."""
    factor = quantization.utils.generate_gparam(weight.amin(), weight.amax())
    largest = weight.unflatten(1, (-1, args.group_size)).abs().amax(2)
    scale, _ = quantization.utils.calculate_qparams(-largest, largest, args, factor)
    module.weight_scale.data.copy_(scale)
    module.weight_global_scale.data.copy_(factor)


@pytest.mark.parametrize(("preset", "scheme"), PRESETS.items(), ids=list(PRESETS))
def test_logits_equal_those_of_the_library(
    tmp_path: Path, preset: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    from compressed_tensors.compressors import ModelCompressor

    dense = OF_WHOLE_GROUPS if preset.startswith("NVFP4") else DENSE
    save_tiny(Tiny("tiny", dense.model_type, dense.seed, dense.config), tmp_path / "plain")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    groups = {"group_0": quantization.preset_name_to_scheme(preset, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    calibrate(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(tmp_path / "packed")
    compressor.decompress_model(model)
    for module in model.modules():  # the numbers alone: activations are not rounded
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    expected = hf_logits(model.float(), IDS)
    near = 0.1 * float(expected.std()) if scheme == "NVFP4" else 3e-3  # the library rounds these to bfloat16
    with caplog.at_level("INFO", "atom"):
        for size in (1, 2):
            for found in logits(tmp_path / "packed", size):
                torch.testing.assert_close(found, expected, atol=near, rtol=1e-3)
    assert any(line.startswith(f"quantization: layers in {scheme}: ") for line in caplog.messages)
