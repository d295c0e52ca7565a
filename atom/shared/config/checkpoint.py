"""What the preparation step read from a checkpoint.

Frontend and core use this and plain files; only the preparation step and the workers import
transformers.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ImageSettings:
    """How images are read: from vision_config, and from the settings of transformers' image processor."""

    token_id: int
    """The placeholder of an image in a prompt, which becomes as many as the image has tokens."""
    vision_config: dict[str, Any]
    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """Patches of a side of a token."""
    max_pixels: int
    """Larger images are scaled down."""
    scale: float
    """Factor of a pixel's byte, before `mean` is subtracted and the result divided by `std`."""
    mean: list[float]
    std: list[float]
    processor: str = "qwen2_vl"
    """What prepares images, as the model's file names it."""
    by_axis: bool = True
    """Whether tokens of an image have RoPE positions by axis; else those of their place in the prompt."""
    sees_ahead: bool = False
    """Whether the tokens of an image see each other, so that one step has to compute all of them."""
    template_text: str = ""
    """What the chat template writes for an image, if a prompt has something else there."""
    prompt_text: str = ""
    """What a prompt has there, with one placeholder."""

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch: three channels."""
        return 3 * self.patch**2

    @property
    def token_bytes(self) -> int:
        """Bytes of the pixels of a token."""
        return self.patch_bytes * self.merge**2

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.max_pixels // (self.patch * self.merge) ** 2


@dataclass(frozen=True)
class Checkpoint:
    directory: str
    """Contains config.json and the safetensors files (for a GGUF: the converted copy)."""
    architecture: str
    """`architectures[0]`, such as LlamaForCausalLM."""
    model_type: str
    hf_config: dict[str, Any]
    """config.json as transformers reads it: `rope_parameters` filled in, `dtype` a plain name."""
    dtype: str
    """The checkpoint's compute dtype: bfloat16, float16 or float32."""
    vocab_size: int
    max_model_len: int
    """Longest context of the model, in tokens."""
    eos_token_ids: list[int] = field(default_factory=list)
    """End-of-sequence ids from generation_config.json, else from config.json; and the tokenizer's."""
    default_sampling: dict[str, float | int] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p of generation_config.json, whatever its do_sample says."""
    ignored_defaults: list[str] = field(default_factory=list)
    """Settings of generation_config.json that are not supported; logged at start."""
    warnings: list[str] = field(default_factory=list)
    """Log lines: where files disagree, and --hf-overrides keys that config.json does not have."""
    tokenizer_file: str | None = None
    """Path of tokenizer.json; with None the server takes and returns token ids only."""
    chat_template_file: str | None = None
    template_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token and other special tokens, by their names in chat templates."""
    keeps_states: bool = False
    """Whether the model has recurrent layers, which rules out prefix caching."""
    mtp_layers: int = 0
    """Layers for multi-token prediction, if `--method mtp` can run them."""
    add_bos_token: bool = False
    """Whether the frontend adds the BOS token, because tokenizer.json's post-processor does not."""
    tool_template_file: str | None = None
    """The chat template for conversations with tools, if the checkpoint names one besides its default."""
    images: ImageSettings | None = None
    """None: the model reads text alone."""
    no_images: str = "this model reads text alone"
    """Why `images` is None."""
