"""What ATOM in vLLM is tried with: model families, features of vLLM, quantized checkpoints, several ranks."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.helpers.checkpoints.quantized_formats import QUANTIZED_MODELS
from tests.helpers.checkpoints.tiny_models import Tiny, tiny

OWN, HOST = "ATOM's", "vLLM's"
"""Whose attention."""
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Case:
    """One run of vLLM's LLM class."""

    what: str
    row: Tiny
    attention: str = OWN
    llm: dict[str, Any] = field(default_factory=dict)
    """Arguments of the LLM class besides the common ones."""
    rounds: int = 1
    """How often the same prompts are sent."""
    format: str | None = None
    """A row of `quantized_formats`; None: a plain checkpoint."""
    proof: str = ""
    """The result that has to be above 0, if any: cached tokens, accepted drafts."""

    @property
    def name(self) -> str:
        return f"{self.what}, {self.row.name}, {self.attention} attention"

    @property
    def environment(self) -> dict[str, str]:
        return {"ATOM_DISABLE_VLLM_PLUGIN_ATTENTION": "0" if self.attention == OWN else "1"}


def wide(name: str, seed: int, **config: Any) -> Tiny:
    """The row with heads of 32 features, the fewest that vLLM's attention on a CPU has, and with `config`."""
    row = tiny(name)
    return replace(row, name=f"{name}-wide-heads", seed=seed, config={**row.config, "head_dim": 32, **config})


def _quantized(model: str) -> Tiny:
    return next(row for row in QUANTIZED_MODELS if row.name == model)


FAMILIES = [
    *(
        Case("family", tiny(name))
        for name in (
            *("llama-gqa", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "mixtral", "glm4-moe", "gpt-oss"),
            *("gemma2", "gemma3", "granite", "llama4", "minimax-m2", "ministral", "ministral3", "olmo2"),
            *("olmo3", "phi3", "smollm3", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2"),
            *("glm-4.7-flash", "glm-5", "mistral-small-4"),
        )
    ),
    *(
        Case("family", wide(name, seed), HOST)
        for name, seed in (
            *(("llama-gqa", 1), ("mistral-window", 1), ("qwen2", 1), ("qwen3", 6), ("qwen3-moe", 1)),
            *(("mixtral", 1), ("glm4-moe", 1), ("gpt-oss", 3), ("gemma2", 23), ("gemma3", 3), ("granite", 1)),
            *(("minimax-m2", 9), ("ministral", 1), ("ministral3", 1), ("olmo2", 1), ("olmo3", 1)),
            *(("phi3", 1), ("smollm3", 1)),
        )
    ),
    # Chunks have to be whole blocks, of which vLLM's attention on a CPU has 32 tokens or more.
    Case("family", wide("llama4", 1, attention_chunk_size=64), HOST, llm={"block_size": 32}),
]
"""Their results are the table of docs/use/plugins.md."""
FEATURES = [
    *(
        Case("chunked prefill", tiny(name), llm={"max_num_batched_tokens": 24, "block_size": 16})
        for name in ("llama-gqa", "deepseek-v3", "gpt-oss", "gemma3", "llama4", "deepseek-v3.2")
    ),
    *(
        Case("speculation", tiny(name), llm={"speculative_config": _NGRAM}, proof="accepted")
        for name in ("llama-gqa", "deepseek-v3", "gpt-oss")
    ),
    # On a CPU vLLM turns the cache off for latents.
    *(
        Case("prefix cache", tiny(name), llm={"block_size": 16}, rounds=2, proof="cached")
        for name in ("llama-gqa", "gpt-oss", "llama4")
    ),
]
QUANTIZED = [
    Case("compressed-tensors, INT8", _quantized("qwen3-moe"), format="compressed-tensors, INT8"),
    Case("compressed-tensors, FP8", _quantized("deepseek-v3"), format="compressed-tensors, channel"),
]
RANKS = [
    Case("two ranks", tiny("llama-gqa"), llm={"tensor_parallel_size": 2}),
    Case("two ranks", tiny("deepseek-v3"), llm={"tensor_parallel_size": 2}),
    # Norms of queries and keys over the heads of both.
    Case("two ranks", tiny("minimax-m2"), llm={"tensor_parallel_size": 2}),
    Case(
        "experts on two ranks",
        tiny("qwen3-moe"),
        llm={"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
]
