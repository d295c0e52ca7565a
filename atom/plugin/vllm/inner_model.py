"""vLLM's own text models, where they are part of a larger one whose other parts are vLLM's."""

from typing import Any

from torch import nn
from vllm.model_executor.model_loader.utils import configure_quant_config, get_model_architecture

from atom.plugin.vllm.registration import REPLACED


def inner_model(vllm_config: Any, prefix: str) -> nn.Module:
    """vLLM's model of this configuration, which is named `prefix` within the larger one.

    Raises ValueError if vLLM has none.
    """
    _, architecture = get_model_architecture(vllm_config.model_config)
    entry = REPLACED.get(architecture)
    if entry is None:
        raise ValueError(
            f"vLLM has no {architecture} of its own to be the {prefix} of a larger model, which ATOM's "
            "models are not: set ATOM_DISABLE_VLLM_PLUGIN=1"
        )
    own = entry.load_model_cls()
    if vllm_config.quant_config is not None:  # vLLM has told it the modules of ATOM's class, which has none
        configure_quant_config(vllm_config.quant_config, own)
    model: nn.Module = own(vllm_config=vllm_config, prefix=prefix)
    return model
