"""The model families that run inside other engines, which keep their own models of all others."""

from collections.abc import Iterator

from workers.checkpoint.families import architectures

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Families with latent attention, which only ATOM's own attention runs."""
OTHERS = ("glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Further families that have been run in a host, see docs/use/plugins.md."""


def replaced(own_attention: bool) -> Iterator[str]:
    """The architectures that ATOM runs in a host, with its own attention or with the host's."""
    for model_type in (*OTHERS, *(LATENT if own_attention else ())):
        yield from architectures()[model_type]
