"""The model families that run inside other engines, which keep their own models of all others.

Each has been run in the host and compared with transformers: docs/use/plugins.md has the results, and why the
others are left to the host.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workers.checkpoint.families import architectures

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4")
"""Families with latent attention, which only ATOM's own attention runs."""
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Families with latent attention to the tokens that an indexer chooses."""
_DENSE = (
    *("gemma3_text", "granite", "llama", "ministral", "ministral3", "mistral", "phi3", "qwen2", "qwen3"),
    "smollm3",
)
_EXPERTS = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe")
_OF_IMAGES = "ForConditionalGeneration"
"""How architectures end that read images too: a host runs its own models of them."""


@dataclass(frozen=True)
class HostFamilies:
    """The families of one host, by the attention that runs them."""

    any_attention: tuple[str, ...]
    own_attention: tuple[str, ...]
    """With ATOM's attention alone."""

    def replaced(self, own_attention: bool) -> Iterator[str]:
        """The architectures that ATOM runs, with its own attention or with the host's."""
        for model_type in (*self.any_attention, *(self.own_attention if own_attention else ())):
            yield from (name for name in architectures()[model_type] if not name.endswith(_OF_IMAGES))


VLLM = HostFamilies((*_DENSE, *_EXPERTS, "gemma2", "llama4_text", "olmo2", "olmo3"), (*LATENT, *_SPARSE))
# SGLang's attention on a CPU neither caps scores (gemma2) nor has chunks (llama4_text). SGLang gives mistral4
# no cache of latents, and its OLMo 2 is OLMo 3 too, whose RoPE parameters by type of layer it drops.
SGLANG = HostFamilies(
    (*_DENSE, *_EXPERTS),
    ("gemma2", "llama4_text", *(name for name in LATENT if name != "mistral4")),
)
HOSTS: Mapping[str, HostFamilies] = {"vLLM": VLLM, "SGLang": SGLANG}
