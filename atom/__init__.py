"""ATOM: an OpenAI-compatible LLM serving engine.

Names are imported on first use: `atom` is both the public API on top of everything and the
home of the leaf types below everything, and must not tie the two into a cycle.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atom.shared.utils.own_packages import check_own_packages, find_own_packages

if TYPE_CHECKING:
    from atom.engine.async_llm_engine import AsyncLLMEngine
    from atom.engine.engine_args import EngineArgs
    from atom.engine.llm_engine import LLMEngine
    from atom.shared.outputs import RequestOutput
    from atom.shared.sampling_params import SamplingParams, StructuredOutputsParams

    __version__: str

__all__ = [
    "AsyncLLMEngine",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "AsyncLLMEngine": "atom.engine.async_llm_engine",
    "EngineArgs": "atom.engine.engine_args",
    "LLMEngine": "atom.engine.llm_engine",
    "RequestOutput": "atom.shared.outputs",
    "SamplingParams": "atom.shared.sampling_params",
    "StructuredOutputsParams": "atom.shared.sampling_params",
}


find_own_packages()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("atom.shared.utils.version").atom_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'atom' has no attribute {name!r}")
    check_own_packages()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
