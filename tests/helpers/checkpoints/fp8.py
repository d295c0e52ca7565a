"""Tiny checkpoints in the FP8 format of DeepSeek V3, and transformers' models of their numbers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints.tiny_models import Tiny, save_tiny

BLOCK = 128
Tensors = dict[str, torch.Tensor]

_HEADS = {"hidden_size": 200, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FP8_MODELS = [
    # 200 inputs are a block of 128 and one of 72; 384 features are 3 blocks, 2 and 1 on two ranks.
    Tiny("qwen3", "qwen3", 8, _HEADS | {"intermediate_size": 384}),
    Tiny("qwen3-moe", "qwen3_moe", 3,
         _HEADS | _EXPERTS | {"intermediate_size": 256, "num_experts": 6, "mlp_only_layers": [0]}),
    # kv_a_proj_with_mqa has 192 outputs: it comes last in its fusion with q_a_proj.
    Tiny("deepseek-v3", "deepseek_v3", 1,
         _EXPERTS | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
                     "num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 128, "kv_lora_rank": 128,
                     "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
                     "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                     "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}),
]  # fmt: skip

QUANTIZED = re.compile(
    r"\.(self_attn|mlp|linear_attn|block_sparse_moe)\..*(_proj(_with_mqa|_qkvz?|_z)?|\.w[123])\.weight$"
)
CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}


def quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, each block's largest magnitude becomes 448."""
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes and scales stand for, element by element."""
    row, column = (torch.arange(size) // BLOCK for size in codes.shape)
    return codes.float() * scales[row][:, column]


def save_fp8(
    model: Tiny,
    directory: Path,
    keeps: Callable[[str], bool] = lambda name: False,
    **config: Any,
) -> torch.nn.Module:
    """Save the model in FP8; returns transformers' model of the dequantized numbers, float32.

    Matrices that `keeps` accepts stay plain; `config` is added to the quantization config.
    """
    save_tiny(model, directory)
    path = directory / "model.safetensors"
    plain: Tensors = load_file(path)
    stored: Tensors = {}
    for name in list(plain):
        if not QUANTIZED.search(name) or keeps(name):
            stored[name] = plain[name]
            continue
        codes, scales = quantized(plain[name])
        stored[name], stored[f"{name}_scale_inv"] = codes, scales
        plain[name] = numbers(codes, scales)
    save_file(plain, path, metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reference.config._experts_implementation = "eager"
    save_file(stored, path, metadata={"format": "pt"})
    settings = directory / "config.json"
    changed = json.loads(settings.read_text()) | {"quantization_config": CONFIG | config}
    settings.write_text(json.dumps(changed))
    return reference
