"""Experts packed as the checkpoints of GPT-OSS keep them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints.tiny_models import Tiny, save_tiny, tiny

Tensors = dict[str, torch.Tensor]


def packed_experts(matrices: Tensors) -> tuple[Tensors, Tensors]:
    """Random MXFP4 tensors in the place of the matrices [X, I, O], and the numbers they stand for."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    packed, plain = {}, {}
    for name, matrix in matrices.items():
        experts, inputs_, outputs = matrix.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs_), generator=generator)
        scales = torch.randint(120, 126, (experts, outputs, inputs_ // 32), generator=generator)
        blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).unflatten(-1, (-1, 16))
        packed[f"{name}_blocks"] = blocks.to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        sign = torch.where(codes >= 8, -1.0, 1.0)
        values = sign * torch.tensor(magnitudes)[codes % 8]
        plain[name] = (
            (values * (2.0 ** (scales - 127)).repeat_interleave(32, -1)).transpose(1, 2).contiguous()
        )
    return packed, plain


@dataclass(frozen=True)
class Saved:
    """A tiny GPT-OSS in MXFP4."""

    reference: torch.nn.Module
    """transformers' model of the dequantized numbers, float32."""
    packed_bytes: int
    """Bytes of the experts' matrices."""
    plain_bytes: int


def save_mxfp4(directory: Path) -> Saved:
    """Save it in `directory`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    save_tiny(Tiny("packed", "gpt_oss", 1, tiny("gpt-oss").config | sizes), directory)
    weights, settings = directory / "model.safetensors", directory / "config.json"
    whole = load(weights.read_bytes())
    matrices = {name: tensor for name, tensor in whole.items() if name.endswith(("up_proj", "down_proj"))}
    packed, plain = packed_experts(matrices)
    save_file(whole | plain, weights, metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    kept = {name: tensor for name, tensor in whole.items() if name not in matrices}
    save_file(kept | packed, weights, metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = json.loads(settings.read_text()) | {"quantization_config": quantization}
    settings.write_text(json.dumps(config))
    sizes_of = (sum(tensor.nbytes for tensor in part.values()) for part in (packed, kept))
    return Saved(reference, *sizes_of)
