"""The entry point. SGLang calls it in each of its processes, before it parses arguments.

Nothing of SGLang is imported before it is called, and no torch. Settings come from SGLang's own server
arguments, never from the command line: `sglang serve`, `python -m sglang.launch_server` and `sglang.Engine`
are the same.
"""

import importlib
import logging
from typing import Any

from atom.plugin.families import SGLANG
from atom.plugin.sglang.host_version import misfit
from atom.shared.utils import envs

MODELS = "atom.plugin.sglang.models"
ATTENTION = "atom"
AITER = "aiter"
"""SGLang's name for AITER's attention, which ROCm machines choose by default."""

logger = logging.getLogger("sglang.srt.plugins.atom")


def register() -> None:
    """Replace SGLang's classes of ATOM's model families and add its attention backends; logs what it did."""
    if envs.ATOM_DISABLE_SGLANG_PLUGIN:
        return
    from sglang.version import __version__

    if problem := misfit(__version__):
        logger.warning("%s", problem)
        return
    own_attention = not envs.ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION
    if own_attention:
        _register_attention()
    names = sorted(set(SGLANG.replaced(own_attention)))
    _register_models(names)
    logger.info("ATOM runs these architectures: %s", ", ".join(names))


def _register_models(names: list[str]) -> None:
    from sglang.srt.environ import envs as host_envs

    if not host_envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():
        # SGLang imports its own models, which takes long, only if it needs one.
        host_envs.SGLANG_EXTERNAL_MODEL_PACKAGE.set(MODELS)
    from sglang.srt.models.registry import ModelRegistry

    modules = [getattr(ModelRegistry.models.get(name), "__module__", "") for name in names]
    if not all(module.startswith(f"{MODELS}.") for module in modules):
        ModelRegistry.register(MODELS, overwrite=True, strict=True)


def _register_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if ATTENTION not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION])
        for target, hook in _HOOKS.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    register_attention_backend(ATTENTION)(_atom_attention)
    register_attention_backend(AITER)(_aiter_attention)


def _atom_attention(runner: Any) -> Any:
    """The backend `atom`, with the providers that the device has."""
    from atom.plugin.sglang.attention_backend import AtomAttentionBackend

    return AtomAttentionBackend(runner)


def _aiter_attention(runner: Any) -> Any:
    """The backend `aiter`: the same. Raises ImportError without AITER."""
    try:
        importlib.import_module(AITER)
    except ImportError as error:
        raise ImportError(
            "--attention-backend aiter needs AITER (pip install 'amd-aiter>=0.1.7', on an AMD GPU): "
            f"{error}; --attention-backend {ATTENTION} needs none"
        ) from error
    return _atom_attention(runner)


def _mha_buffers(create: Any, pool: Any) -> None:
    from atom.plugin.sglang.kv_pool import create_kv

    create_kv(create, pool)


def _latent_buffers(create: Any, pool: Any) -> None:
    from atom.plugin.sglang.kv_pool import create_latents

    create_latents(create, pool)


_POOLS = "sglang.srt.mem_cache.memory_pool"
_HOOKS = {
    f"{_POOLS}.MHATokenToKVPool._create_buffers_normal": _mha_buffers,
    f"{_POOLS}.MLATokenToKVPool._create_buffers": _latent_buffers,
}
"""Functions of SGLang that its hook registry wraps."""
