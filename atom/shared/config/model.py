"""The model and its dtype."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from atom.shared.config.fields import NAMES, OBJECT


@dataclass(frozen=True)
class ModelConfig:
    model: Annotated[str, Meta(min_length=1)] = "Qwen/Qwen3-0.6B"
    """Checkpoint directory, .gguf file, or name on the hub: owner/name, owner/name:file.gguf, or
    owner/name:Q4_K_M for the GGUF files of a quantization. Of a GGUF model in parts the first one, or their
    directory."""
    revision: Annotated[str, Meta(min_length=1)] | None = None
    """Branch, tag or commit on the hub. If unset: the main branch."""
    download_dir: Annotated[str, Meta(min_length=1)] | None = None
    """Directory for downloaded checkpoints. If unset: the hub library's cache (HF_HOME)."""
    served_model_name: Annotated[str, NAMES] | None = None
    """Name of the model in the API, or several: `a b` or a,b. If unset: the value of --model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype. auto takes the checkpoint's if the device supports it, else float16 (GPU) or float32."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Context length: most tokens of prompt and output together. If unset: the checkpoint's."""
    hf_overrides: Annotated[str, OBJECT] | None = None
    """JSON object to merge into config.json, such as '{"rope_parameters": {"factor": 2.0}}'."""
    online_quant_config: Annotated[str, OBJECT] | None = None
    """JSON object: quantize a plain checkpoint while it loads, as '{"global_quant_config": "ptpc_fp8"}'."""
    limit_mm_per_prompt: Annotated[str, OBJECT] | None = None
    """JSON object: most images of a prompt, such as '{"image": 4}'. If unset: 64. With 0 no vision model is
    loaded."""
    trust_remote_code: bool = False
    """No effect, accepted for existing scripts: code from a checkpoint is never run."""
    load_dummy: bool = False
    """Initialize the weights with random numbers instead of loading them."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in the API."""
        given = self.served_model_name
        return (self.model,) if given in (None, self.model) else tuple(str(given).split(","))
