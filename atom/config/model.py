"""Which model runs, and how its numbers are kept."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from atom.config.fields import OBJECT


@dataclass(frozen=True)
class ModelConfig:
    model: Annotated[str, Meta(min_length=1)] = "Qwen/Qwen3-0.6B"
    """A Hugging Face checkpoint's directory, a .gguf file, or a hub's owner/name or owner/name:file.gguf."""
    revision: Annotated[str, Meta(min_length=1)] | None = None
    """Branch, tag or commit to fetch from the hub; its main branch when absent."""
    download_dir: Annotated[str, Meta(min_length=1)] | None = None
    """Where fetched checkpoints are kept; the hub library's own cache (HF_HOME) when absent."""
    served_model_name: Annotated[str, Meta(min_length=1)] | None = None
    """Name that the API shows and accepts; the value of --model when absent."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype. auto takes the checkpoint's where the device computes in it, else float32."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Longest prompt and answer together, in tokens; the checkpoint's limit when absent."""
    hf_overrides: Annotated[str, OBJECT] | None = None
    """JSON object merged into config.json, such as '{"rope_parameters": {"factor": 2.0}}'."""
    trust_remote_code: bool = False
    """Accepted for scripts that have it, without effect: code from a checkpoint is never run."""
    load_dummy: bool = False
    """Fill the weights with random numbers instead of reading them."""
