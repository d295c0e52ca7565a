"""Tiny models with a vision tower: whole checkpoints, images for them, and transformers' outputs."""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from atom.shared.messages.images import KEY_BYTES, PromptImage
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.checkpoints.tiny_models import VOCAB

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
START_ALONE = TEMPLATE.replace("".join((TAGS[1], TAGS[0], TAGS[2])), TAGS[1])
"""Writes the first token of an image for the whole of it."""
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
_SIDE = 32
_SQUARE: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": _SIDE, "width": _SIDE},
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}
_PADDED: dict[str, Any] = {
    "media_proc_cfg": {
        "in_patch_limit": 192,
        "patch_limit_on_one_side": 32,
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.25, 0.3],
        "fixed_output_tokens": None,
    }
}
PROCESSORS = {"gemma3": _SQUARE, "kimi_k25": _PADDED}
"""By model_type; the others have `PROCESSOR`."""
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
GEMMA3: tuple[dict[str, Any], dict[str, Any]] = (
    _TEXT | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 10,
        "query_pre_attn_scalar": 16,
    },
    {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
)  # fmt: skip
"""A window is shorter than the 16 tokens of an image."""
_IDS = dict.fromkeys(("image_token_id", "vision_start_token_id", "vision_end_token_id"))
KIMI: tuple[dict[str, Any], dict[str, Any]] = (
    _TEXT | {
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
    },
)  # fmt: skip
_FIELDS = {
    "kimi_k25": {"projection_hidden_size": 32, "tie_word_embeddings": False, **_IDS},
    "gemma3": {
        "mm_tokens_per_image": (_SIDE // PATCH // MERGE) ** 2,
        **dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index")),
    },
}
"""Fields outside of text_config and vision_config; those without a value get the ids of `TAGS`."""


def build(
    model_type: str,
    seed: int = 1,
    ids: Sequence[int] = (VOCAB, IMAGE, START, END),
    text: Mapping[str, Any] | None = None,
) -> Any:
    """The transformers model, float32, with weights that make tokens differ clearly.

    `ids` are the size of the vocabulary, then the ids of `TAGS`; `text` are changes to text_config.
    """
    common, vision = (MODELS | {"gemma3": GEMMA3, "kimi_k25": KIMI})[model_type]
    text = common | dict(text or {})
    vocab, *tags = ids
    fields: dict[str, Any] = dict(_FIELDS.get(model_type, _IDS))
    unset = [name for name, value in fields.items() if value is None]
    config = AutoConfig.for_model(
        model_type,
        text_config=text | {"vocab_size": vocab},
        vision_config=vision | ({} if model_type in _FIELDS else {"out_hidden_size": text["hidden_size"]}),
        **fields | dict(zip(unset, tags, strict=True)),
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
            elif model_type == "gemma3" and "embed_tokens" in name:
                weight.normal_(0, weight.shape[1] ** -0.5)  # which the model scales by the inverse
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
    if model.config.model_type == "kimi_k25":
        as_moonshot_publishes(directory)
    processor = PROCESSORS.get(str(model.config.model_type), PROCESSOR)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


_PUBLISHED = {
    **{
        name: f"vt_{name}"
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    },
    **{name: f"init_{name}" for name in ("pos_emb_height", "pos_emb_width")},
}


def as_moonshot_publishes(directory: Path) -> None:
    """Change what transformers saves otherwise; it also renames the layers of the text model."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"] | {"model_type": "kimi_k2"}
    vision = {_PUBLISHED.get(name, name): value for name, value in config["vision_config"].items()}
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
    }
    path.write_text(json.dumps(config | published))
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    renamed = {
        name.removeprefix("model.").replace("model.blocks.", "model.layers."): tensor
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})


def save_with_tokenizer(model_type: str, directory: Path) -> torch.nn.Module:
    """A checkpoint that can be served; returns the model."""
    directory.mkdir(exist_ok=True)
    found = tiny_tokenizer.checkpoint(directory, TAGS)
    tokenizer = tiny_tokenizer.build(TAGS)
    model = build(model_type, ids=(found.vocab_size, *map(tokenizer.token_to_id, TAGS)))
    save(model, directory)
    template = START_ALONE if model_type == "gemma3" else TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
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


@cache
def processed(file: bytes, model_type: str = "qwen3_vl") -> Processed:
    return {"gemma3": _square, "kimi_k25": _padded}.get(model_type, _scaled)(file)


def _square(file: bytes) -> Processed:
    settings = {name: value for name, value in _SQUARE.items() if name != "image_processor_type"}
    image = Image.open(io.BytesIO(file))
    found = Gemma3ImageProcessorPil(**settings)(images=image, return_tensors="pt")
    plain = Gemma3ImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
    levels = plain(images=image, return_tensors="np")["pixel_values"][0].astype(np.uint8)
    return Processed(found["pixel_values"], (_SIDE // PATCH,) * 2, _by_token(levels))


def _padded(file: bytes) -> Processed:
    """An image that is not too large for its processor: black from its ends to those of its tokens."""
    levels = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    unit = PATCH * MERGE
    padding = [(0, -size % unit) for size in levels.shape[:2]]
    levels = np.pad(levels, [*padding, (0, 0)]).transpose(2, 0, 1)
    mean, std = (
        np.array(_PADDED["media_proc_cfg"][name])[:, None, None] for name in ("image_mean", "image_std")
    )
    values = torch.from_numpy((levels / 255 - mean) / std).float()
    patches = values.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4)
    return Processed(patches.flatten(0, 1), (patches.shape[0], patches.shape[1]), _by_token(levels))


def _by_token(levels: Any) -> bytes:
    """The pixels of an image [3, H, W] as the workers read them."""
    rows, columns = (size // PATCH for size in levels.shape[1:])
    patches = [
        levels[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        for top in range(0, rows, MERGE)
        for left in range(0, columns, MERGE)
        for row in range(top, top + MERGE)
        for column in range(left, left + MERGE)
    ]
    return np.stack(patches).tobytes()


def _scaled(file: bytes) -> Processed:
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
        kinds = (inputs["input_ids"] == model.config.image_token_id).int()
        if model.config.model_type == "gemma3":
            return inputs | {"token_type_ids": kinds}
        inputs["image_grid_thw"] = torch.tensor([[1, *image.grid] for image in images])
        if model.config.model_type != "kimi_k25":
            inputs["mm_token_type_ids"] = kinds
    return inputs


def hf_follows(
    model: torch.nn.Module, ids: list[int], images: list[Processed], output: Sequence[int]
) -> list[int]:
    """The likeliest token after the prompt `ids` and after each token of `output` but the last.

    So it is `output` itself if and only if that is the greedy continuation; one pass tells.
    """
    return hf_logits(model, [*ids, *output[:-1]], images)[len(ids) - 1 :].argmax(-1).tolist()
