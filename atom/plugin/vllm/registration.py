"""The entry points. vLLM calls them in each process (frontend, engine core, workers), some several times.

Nothing of vLLM is imported before they are called, and no torch: a model class is registered by its name.
"""

from typing import Any

from atom.plugin.families import VLLM
from atom.plugin.vllm.host_version import misfit
from atom.shared.utils import envs

PLATFORM = "atom.plugin.vllm.platform.AtomPlatform"
MODEL = "atom.plugin.vllm.model:AtomForCausalLM"
ATTENTION_BACKEND = "atom.plugin.vllm.own_attention.AtomAttentionBackend"
REPLACED: dict[str, Any] = {}
"""vLLM's own entry of each architecture that is registered, if it has one."""


def register_platform() -> str | None:
    """The platform's class, for vllm.platform_plugins; None leaves vLLM as it is."""
    if envs.ATOM_DISABLE_VLLM_PLUGIN:
        return None
    from vllm.platforms import builtin_platform_plugins
    from vllm.version import __version__

    has_one = sum(detect() is not None for detect in builtin_platform_plugins.values()) == 1
    return PLATFORM if has_one and misfit(__version__) is None else None


def register_models() -> None:
    """Replace vLLM's classes of ATOM's model families, for vllm.general_plugins. Logs what it did."""
    if envs.ATOM_DISABLE_VLLM_PLUGIN:
        return
    from vllm.logger import init_logger
    from vllm.version import __version__

    logger = init_logger("vllm.plugins.atom")
    if problem := misfit(__version__):
        logger.warning("%s", problem)
        return
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    own_attention = not envs.ATOM_DISABLE_VLLM_PLUGIN_ATTENTION
    if own_attention:
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    names = sorted(set(VLLM.replaced(own_attention)))
    for name in names:
        REPLACED.setdefault(name, ModelRegistry.models.get(name))
        ModelRegistry.register_model(name, MODEL)
    kind = "ATOM's" if own_attention else "vLLM's"
    logger.info("ATOM runs these architectures, with %s attention: %s", kind, ", ".join(names))
