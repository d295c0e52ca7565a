"""FP8 checkpoints of families that stack their experts with inputs before outputs, in two layouts.

`STACKED` is that of Qwen's files (scales of blocks) and of transformers' (fbgemm_fp8); `ALONE` has tensors
of each expert, as Meta's Llama 4 Maverick has in compressed-tensors. Both have the same numbers.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers.checkpoints import vision_models
from tests.helpers.checkpoints.quantized_formats import FORMATS, StoredFormat
from tests.helpers.checkpoints.tiny_models import Tiny, save_tiny, tiny

Tensors = dict[str, torch.Tensor]
STACKED, ALONE = "stacked", "alone"
# Matrices of down_proj and their block scales are square: no shape tells which dimension is first.
_WIDE = {
    "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 256, "num_hidden_layers": 2,
}  # fmt: skip
LLAMA4 = replace(
    tiny("llama4"),
    config=tiny("llama4").config | _WIDE | {"intermediate_size_mlp": 256, "num_local_experts": 4},
)
_LINEAR = re.compile(r"\.layers\..*\.(self_attn|mlp|feed_forward)\..*_proj\.weight$")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")


@dataclass(frozen=True)
class Family:
    """How transformers builds, saves and loads a tiny model."""

    model: Tiny | str
    """A row, or a model_type of `vision_models`."""
    inputs_first: bool
    """Whether transformers saves plain experts so."""
    excluded: tuple[str, ...]
    """Modules that are not quantized."""

    def save(self, directory: Path) -> None:
        if isinstance(self.model, Tiny):
            save_tiny(self.model, directory)
            return
        text = _WIDE | {"moe_intermediate_size": 256}
        vision_models.save(vision_models.build(self.model, text=text), directory)

    def reference(self, directory: Path) -> torch.nn.Module:
        """Transformers' model of the saved plain numbers, float32."""
        auto: Any = AutoModelForCausalLM if isinstance(self.model, Tiny) else AutoModelForImageTextToText
        model: torch.nn.Module = auto.from_pretrained(directory, dtype=torch.float32).eval()
        for config in (model.config, model.config.get_text_config()):
            config._experts_implementation = "eager"
        return model


FAMILIES = {
    "qwen3_vl_moe": Family("qwen3_vl_moe", False, ("lm_head", "model.visual")),
    "llama4": Family(LLAMA4, True, ("lm_head",)),
}


def format_of(name: str) -> StoredFormat:
    """The row of that name."""
    return next(each for each in FORMATS if each.name == name)


def save_stacked(family: Family, format: StoredFormat, directory: Path) -> torch.nn.Module:
    """Save both layouts, in directories of their names; returns transformers' model of the numbers."""
    family.save(directory)
    (path,) = directory.glob("*.safetensors")
    plain = load_file(path)
    saved: dict[str, Tensors] = {STACKED: {}, ALONE: {}}
    for name, tensor in list(plain.items()):
        if found := _EXPERTS.match(name):
            outputs_first = tensor.transpose(1, 2) if family.inputs_first else tensor
            parts = list(_parts(outputs_first, found[2], format))
            numbers = torch.stack([torch.cat([each.numbers for each in expert]) for expert in parts])
            plain[name] = (numbers.transpose(1, 2) if family.inputs_first else numbers).contiguous()
            saved[STACKED] |= _stacked(name, parts)
            saved[ALONE] |= {f"{found[1]}.{key}": each for key, each in _alone(parts).items()}
            continue
        stored = {name: tensor}
        if _LINEAR.search(name):
            module = name.removesuffix(".weight")
            tensors, plain[name] = format.store(tensor)
            stored = {f"{module}.{part}": each.contiguous() for part, each in tensors.items()}
        for each in saved.values():
            each.update(stored)
    save_file(plain, path, metadata={"format": "pt"})
    reference = family.reference(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = format.config("") | {format.exclusions: list(family.excluded)}
    for layout, held in saved.items():
        (directory / layout).mkdir()
        save_file(held, directory / layout / "model.safetensors", metadata={"format": "pt"})
        for file in directory.glob("*.json"):
            (directory / layout / file.name).write_bytes(file.read_bytes())
        (directory / layout / "config.json").write_text(json.dumps(config))
    return reference


@dataclass(frozen=True)
class _Part:
    name: str
    tensors: Tensors
    numbers: torch.Tensor


def _parts(matrices: torch.Tensor, which: str, format: StoredFormat) -> Iterator[list[_Part]]:
    """The matrices [O, I] of each expert, quantized one by one."""
    names = ("gate", "up") if which == "gate_up" else ("down",)
    for matrix in matrices:
        yield [
            _Part(f"{name}_proj", *format.store(part))
            for name, part in zip(names, matrix.chunk(len(names)), strict=True)
        ]


def _alone(experts: list[list[_Part]]) -> Tensors:
    return {
        f"{number}.{part.name}.{name}": tensor.contiguous()
        for number, parts in enumerate(experts)
        for part in parts
        for name, tensor in part.tensors.items()
    }


def _stacked(name: str, experts: list[list[_Part]]) -> Tensors:
    def stack(part: str, inputs_first: bool) -> torch.Tensor:
        found = torch.stack([torch.cat([each.tensors[part] for each in parts]) for parts in experts])
        return (found.transpose(1, 2) if inputs_first else found).contiguous()

    (scale,) = experts[0][0].tensors.keys() - {"weight"}
    # transformers has the axis of 1 last in the scales of down_proj.
    inputs_first = scale == "weight_scale_inv" or name.endswith("gate_up_proj")
    return {name: stack("weight", True), name + scale.removeprefix("weight"): stack(scale, inputs_first)}
