"""Which layouts of ranks each model family is tested in. docs/models.md lists them."""

from dataclasses import replace

import msgspec

from atom.config.engine import EngineConfig


class Layout(msgspec.Struct, frozen=True):
    """How a model is spread over ranks."""

    name: str
    tp: int = 1
    expert_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tp

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with the flags of this layout."""
        parallel = replace(
            base.parallel, tensor_parallel_size=self.tp, enable_expert_parallel=self.expert_parallel
        )
        return replace(base, parallel=parallel)


LAYOUTS = (Layout("TP 2", 2), Layout("TP 2 + EP", 2, expert_parallel=True), Layout("TP 3", 3))

ROWS = {
    "llama": "llama-odd-gqa",
    "mistral": "mistral-odd-gqa-dynamic-rope",
    "qwen2": "qwen2-odd-gqa-untruncated-yarn-rope",
    "qwen3": "qwen3-odd-gqa-biases-windows",
    "qwen3_moe": "qwen3-moe-dense-first-odd-gqa",
    "mixtral": "mixtral-odd-gqa-tied",
    "glm4_moe": "glm4-moe-odd-gqa-tied",
    "deepseek_v2": "deepseek-v2-odd-heads-biases-tied",
    "deepseek_v3": "deepseek-v3-yarn-odd-heads",
    "deepseek_v32": "deepseek-v3.2-yarn-odd-heads-biases",
    "glm_moe_dsa": "glm-5-pattern-tied",
    "gpt_oss": "gpt-oss-odd-gqa-untruncated-yarn-rope",
    "qwen3_next": "qwen3-next-odd-heads-biases",
}
"""Family -> its row of the tiny models. Two ranks have unequal shares of most, three can share all."""
_WITHOUT_EXPERTS = ("llama", "mistral", "qwen2", "qwen3")


def layouts_of(family: str) -> list[Layout]:
    """The layouts that a family is tested in."""
    return [each for each in LAYOUTS if not (each.expert_parallel and family in _WITHOUT_EXPERTS)]


def cases() -> list[tuple[str, Layout]]:
    """(family, layout) of every test."""
    return [(family, layout) for family in ROWS for layout in layouts_of(family)]
