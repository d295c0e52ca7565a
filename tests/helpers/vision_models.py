"""Tiny models with a vision tower: whole checkpoints, images for them, and transformers' outputs."""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from atom.shared.messages.images import KEY_BYTES, PromptImage
from tests.helpers import tiny_tokenizer
from tests.helpers.tiny_models import VOCAB

IMAGE, START, END = VOCAB - 3, VOCAB - 2, VOCAB - 1
"""Ids of the placeholder of an image's tokens, and of what is before and after them."""
TAGS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}[{{ message.role }}]{{ show(message.content) }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PATCH, MERGE = 4, 2
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * (PATCH * MERGE) ** 2, "longest_edge": 48 * (PATCH * MERGE) ** 2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}
_TOWER = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 25,
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        _TEXT | {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
        _TOWER | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_5": (
        _TEXT | _DELTA | {
            "head_dim": 32,
            "rope_parameters": _ROPE | {"mrope_section": [3, 2, 3], "partial_rotary_factor": 0.5},
        },
        _TOWER,
    ),
    "qwen3_vl_moe": (
        _TEXT | _EXPERTS | {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
        _TOWER | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3_5_moe": (
        _TEXT | _DELTA | _EXPERTS | {
            "head_dim": 32,
            "shared_expert_intermediate_size": 40,
            "rope_parameters": _ROPE | {"mrope_section": [3, 2, 3], "partial_rotary_factor": 0.5},
        },
        _TOWER,
    ),
}  # fmt: skip
"""(text_config, vision_config) by model_type."""


def build(
    model_type: str,
    seed: int = 1,
    ids: Sequence[int] = (VOCAB, IMAGE, START, END),
    text: Mapping[str, Any] | None = None,
) -> Any:
    """The transformers model, float32, with weights that make tokens differ clearly.

    `ids` are the size of the vocabulary, then the ids of `TAGS`; `text` are changes to text_config.
    """
    common, vision = MODELS[model_type]
    text = common | dict(text or {})
    vocab, *tags = ids
    config = AutoConfig.for_model(
        model_type,
        text_config=text | {"vocab_size": vocab},
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        **dict(zip(("image_token_id", "vision_start_token_id", "vision_end_token_id"), tags, strict=True)),
    )
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-4, -1)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif "embed" in name and weight.dim() == 2:
                weight.normal_(0, 1.0)
            elif weight.dim() > 1:
                weight.normal_(0, 1.5 * (weight[0].numel() if weight.dim() > 3 else weight.shape[-1]) ** -0.5)
            elif not weight.any():
                weight.uniform_(-0.5, 0.5)
            else:
                weight.uniform_(0.5, 1.5)
    return model


def save(model: torch.nn.Module, directory: Path) -> None:
    """The files of the checkpoint, without a tokenizer."""
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def save_with_tokenizer(model_type: str, directory: Path) -> torch.nn.Module:
    """A checkpoint that can be served; returns the model."""
    directory.mkdir(exist_ok=True)
    found = tiny_tokenizer.checkpoint(directory, TAGS)
    tokenizer = tiny_tokenizer.build(TAGS)
    model = build(model_type, ids=(found.vocab_size, *map(tokenizer.token_to_id, TAGS)))
    save(model, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return model


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """The file of an image with some structure at all scales."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(image).astype(int) + random.integers(-30, 30, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, kind)
    return file.getvalue()


@dataclass(frozen=True)
class Processed:
    """What transformers' processor makes of a file."""

    pixel_values: torch.Tensor
    grid: tuple[int, int]
    """Patches: rows, columns."""
    pixels: bytes
    """As the workers read them."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] // MERGE**2

    def at(self, start: int) -> PromptImage:
        """The image in a prompt, whose placeholders begin at `start`."""
        rows, columns = (size // MERGE for size in self.grid)
        key = hashlib.blake2b(self.pixels, digest_size=KEY_BYTES).digest()
        return PromptImage(key, start, rows, columns, self.pixels)


def processed(file: bytes) -> Processed:
    settings = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    image = Image.open(io.BytesIO(file))
    found = Qwen2VLImageProcessorPil(**settings)(images=image, return_tensors="pt")
    plain = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
    levels = plain(images=image, return_tensors="np")["pixel_values"].reshape(-1, 3, 2, PATCH * PATCH)
    _, rows, columns = found["image_grid_thw"][0].tolist()
    return Processed(found["pixel_values"], (rows, columns), levels[:, :, 0].astype(np.uint8).tobytes())


def prompt(*parts: Processed | list[int]) -> tuple[list[int], list[PromptImage]]:
    """(ids, images) of a prompt of texts and images, each between START and END."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        images.append(part.at(len(ids) + 1))
        ids += [START, *[IMAGE] * part.num_tokens, END]
    return ids, images


def hf_logits(model: torch.nn.Module, ids: list[int], images: list[Processed]) -> torch.Tensor:
    """Logits [tokens, V] of a text whose placeholders stand for these images."""
    with torch.no_grad():
        return model(**image_inputs(model, ids, images), use_cache=False).logits[0]


def image_inputs(model: Any, ids: list[int], images: Sequence[Processed]) -> dict[str, Any]:
    """The arguments of transformers' model."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if images:
        inputs["pixel_values"] = torch.cat([image.pixel_values for image in images])
        inputs["image_grid_thw"] = torch.tensor([[1, *image.grid] for image in images])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    return inputs


def hf_follows(
    model: torch.nn.Module, ids: list[int], images: list[Processed], output: Sequence[int]
) -> list[int]:
    """The likeliest token after the prompt `ids` and after each token of `output` but the last.

    So it is `output` itself if and only if that is the greedy continuation; one pass tells.
    """
    return hf_logits(model, [*ids, *output[:-1]], images)[len(ids) - 1 :].argmax(-1).tolist()
