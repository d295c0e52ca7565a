"""Which layouts of ranks each model family is tested in. docs/use/models.md lists them."""

from dataclasses import replace

import msgspec

from atom.shared.config.engine import EngineConfig
from atom.shared.config.parallel import All2AllBackend
from parallel.mesh import MeshShape


class Layout(msgspec.Struct, frozen=True):
    """How a model is spread over ranks."""

    name: str
    tp: int = 1
    expert_parallel: bool = False
    dp: int = 1
    all2all: All2AllBackend = "auto"
    dcp: int = 1
    moving_experts: bool = False
    """Whether experts move between the ranks every few steps."""

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.tp, self.dp, dcp=self.dcp)

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with the flags of this layout."""
        parallel = replace(
            base.parallel,
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            enable_expert_parallel=self.expert_parallel,
            all2all_backend=self.all2all,
            decode_context_parallel_size=self.dcp,
        )
        if self.moving_experts:
            parallel = replace(parallel, enable_eplb=True, eplb_config=_EPLB)
        return replace(base, parallel=parallel)


_EPLB = '{"window_size": 3, "step_interval": 5, "num_redundant_experts": 2}'
MOVING = Layout("DP 2 + EP, moving experts", expert_parallel=True, dp=2, moving_experts=True)
LAYOUTS = (
    Layout("TP 2", 2),
    Layout("TP 2 + EP", 2, expert_parallel=True),
    Layout("TP 3", 3),
    Layout("TP 3 + DCP 3", 3, dcp=3),
    Layout("DP 2 + EP", expert_parallel=True, dp=2),
    Layout("DP 3 + EP", expert_parallel=True, dp=3, all2all="alltoall"),
    Layout("DP 2 x TP 2 + EP", 2, expert_parallel=True, dp=2, all2all="allgather_reducescatter"),
)

ROWS = {
    "llama": "llama-odd-gqa",
    "mistral": "mistral-odd-gqa-dynamic-rope",
    "qwen2": "qwen2-odd-gqa-untruncated-yarn-rope",
    "qwen3": "qwen3-odd-gqa-biases-windows",
    "qwen3_moe": "qwen3-moe-dense-first-odd-gqa",
    "mixtral": "mixtral-odd-gqa-tied",
    "minimax_m2": "minimax-m2-odd-gqa-tied",
    "glm4_moe": "glm4-moe-odd-gqa-tied",
    "deepseek_v2": "deepseek-v2-odd-heads-biases-tied",
    "deepseek_v3": "deepseek-v3-yarn-odd-heads",
    "deepseek_v32": "deepseek-v3.2-yarn-odd-heads-biases",
    "glm_moe_dsa": "glm-5-pattern-tied",
    "glm4_moe_lite": "glm-4.7-flash-odd-heads-biases-tied",
    "mistral4": "mistral-small-4-odd-heads-biases-tied",
    "gpt_oss": "gpt-oss-odd-gqa-untruncated-yarn-rope",
    "qwen3_next": "qwen3-next-odd-heads-biases",
    "qwen3_5_text": "qwen3.5-odd-heads-biases",
    "qwen3_5_moe_text": "qwen3.5-moe-odd-heads-biases",
    "deepseek_v4": "deepseek-v4",
    "kimi_linear": "kimi-linear-odd-heads",
    "smollm3": "smollm3-odd-gqa-biases-windows",
    "gemma2": "gemma2-odd-gqa-biases-windows",
    "gemma3_text": "gemma3-odd-gqa-biases-linear-rope",
    "phi3": "phi3-odd-gqa-tied-window-longrope",
    "granite": "granite-odd-gqa-biases-tied",
    "granitemoehybrid": "granite4-odd-gqa-biases-tied-without-rope",
    "olmo2": "olmo2-odd-gqa-biases",
    "olmo3": "olmo3-odd-gqa-biases",
    "llama4_text": "llama4-odd-gqa-biases-dense",
    "ministral": "ministral-odd-gqa-tied",
    "ministral3": "ministral3-odd-gqa-tied-window",
}
"""Family -> its row of the tiny models. Two ranks have unequal shares of most, three can share all."""
_WITHOUT_EXPERTS = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "phi3", "granite"),
    "granitemoehybrid",
    *("olmo2", "olmo3", "ministral", "ministral3", "qwen3_5_text"),
)
_IN_MOST_LAYOUTS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""The others with experts have one layout of engines in lockstep."""
IN_TWO_GROUPS = ("deepseek_v4",)
"""Families whose row has two groups of heads, which three ranks cannot share."""
_SPLIT_BY_TOKENS = ("deepseek_v2", "deepseek_v3")
"""Families whose KV cache ranks can split by tokens."""


def layouts_of(family: str) -> list[Layout]:
    """The layouts that a family is tested in."""
    return [
        each
        for each in LAYOUTS
        if not (each.expert_parallel and family in _WITHOUT_EXPERTS)
        and not (each.tp > 2 and family in IN_TWO_GROUPS)
        and not (each.dcp > 1 and family not in _SPLIT_BY_TOKENS)
        and (each.dp == 1 or each.ranks == 2 or family in _IN_MOST_LAYOUTS)
    ]


def cases() -> list[tuple[str, Layout]]:
    """(family, layout) of every test."""
    return [(family, layout) for family in ROWS for layout in layouts_of(family)]
