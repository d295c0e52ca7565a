"""The platform that vLLM runs on: the one that it would choose itself, ROCm, CUDA or CPU, and ATOM's backend.

Its base class is known when vLLM resolves its platform; importing this module before that fails.
"""

from typing import Any

from vllm.platforms import builtin_platform_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def machine_platform() -> str:
    """The class of the machine's own platform. Raises RuntimeError where vLLM finds none, or several."""
    found: list[str] = [
        name for detect in builtin_platform_plugins.values() if (name := detect()) is not None
    ]
    if len(found) != 1:
        names = ", ".join(found) or "no platform"
        raise RuntimeError(
            f"vLLM finds {names} on this machine, and ATOM's plugin needs exactly one; set "
            "ATOM_DISABLE_VLLM_PLUGIN=1"
        )
    return found[0]


_Machine: Any = resolve_obj_by_qualname(machine_platform())


class AtomPlatform(_Machine):
    """The machine's platform; `--attention-backend CUSTOM` gives vLLM's own models ATOM's attention, too."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        """The class of the attention backend for a layer of vLLM's own models."""
        if selected_backend is AttentionBackendEnum.CUSTOM:
            path: str = AttentionBackendEnum.CUSTOM.get_path()
            return path
        chosen: str = super().get_attn_backend_cls(selected_backend, *args, **kwargs)
        return chosen
