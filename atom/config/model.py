"""Which model runs, and how its numbers are kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    model: str = "Qwen/Qwen3-0.6B"
    """A directory with a Hugging Face checkpoint, or one .gguf file."""
    served_model_name: str | None = None
    """Name that the API shows and accepts; the value of --model when absent."""
    dtype: str = "auto"
    """Compute dtype: auto, bfloat16, float16 or float32. auto takes the checkpoint's where the device computes in it."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; the checkpoint's limit when absent."""
    load_dummy: bool = False
    """Fill the weights with random numbers instead of reading them."""
