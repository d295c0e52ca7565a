"""What the status page says about the model and the layout of the server."""

from typing import Any

from atom.shared.messages.launch import FrontendLaunch
from atom.shared.utils.version import atom_version
from frontend.status.records import Layout

__all__ = ["layout_of"]


def layout_of(launch: FrontendLaunch, model: str) -> Layout:
    """The layout of the resolved configuration; `model` is the name in the API."""
    config = launch.config
    checkpoint = launch.checkpoint
    dtype = config.model.dtype
    return Layout(
        version=atom_version(),
        model=model,
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype if dtype == "auto" else dtype,
        quantization=_quantization(checkpoint.hf_config),
        kv_cache_dtype=config.cache.kv_cache_dtype,
        device=config.device.device,
        data_parallel_size=config.parallel.data_parallel_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel=config.parallel.enable_expert_parallel,
        speculation=config.speculative.method,
        num_speculative_tokens=config.speculative.num_speculative_tokens,
        prefix_caching=config.cache.enable_prefix_caching,
        max_num_seqs=config.scheduler.max_num_seqs or 0,
        max_queued_requests=launch.server.max_queued_requests,
        num_frontends=launch.num_frontends,
        has_chat=checkpoint.chat_template_file is not None,
    )


def _quantization(hf_config: dict[str, Any]) -> str | None:
    stated = hf_config.get("quantization_config")
    return str(stated.get("quant_method", "unknown")) if isinstance(stated, dict) else None
