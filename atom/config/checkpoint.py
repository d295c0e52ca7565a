"""What the preparation step found out about a checkpoint.

Frontend and core read this and plain files; only the preparation step and the workers know
transformers.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    directory: str
    """Holds config.json and the safetensors files (for a GGUF: the converted copy)."""
    architecture: str
    """`architectures[0]`, for example LlamaForCausalLM."""
    model_type: str
    hf_config: dict[str, Any]
    """config.json as transformers reads it: `rope_parameters` filled in, `dtype` a plain name."""
    dtype: str
    """The dtype that the checkpoint means to be computed in: bfloat16, float16 or float32."""
    vocab_size: int
    max_model_len: int
    """Positions that the model was made for."""
    eos_token_ids: list[int] = field(default_factory=list)
    """Every id that ends a generation, from generation_config.json, else config.json."""
    default_sampling: dict[str, float | int] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p of generation_config.json, where it samples."""
    ignored_defaults: list[str] = field(default_factory=list)
    """Settings of generation_config.json that this engine does not know; named at start."""
    added_settings: list[str] = field(default_factory=list)
    """Changes of settings that config.json does not have, in a line each; named at start."""
    tokenizer_file: str | None = None
    """A tokenizer.json; None serves token ids only."""
    chat_template_file: str | None = None
    template_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token, … as chat templates name them."""
    keeps_states: bool = False
    """Whether it has recurrent layers: of their states equal beginnings can share nothing."""
    add_bos_token: bool = False
    """Not needed by tokenizer.json's own post-processor; for tokenizers that leave it to the caller."""
