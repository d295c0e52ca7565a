"""What ATOM in SGLang is tried with: families, features of SGLang, formats, two ranks, the HTTP server."""

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.checkpoints.quantized_formats import QUANTIZED_MODELS
from tests.helpers.checkpoints.tiny_models import Tiny, tiny
from tests.helpers.plugins.host_runs import MIN_MARGIN

OWN, HOST = "ATOM's", "SGLang's"
"""Whose attention."""
_BACKENDS = {OWN: "atom", HOST: "torch_native"}


@dataclass(frozen=True)
class Case:
    """One run of SGLang's Engine."""

    what: str
    row: Tiny
    attention: str = OWN
    format: str | None = None
    """A row of `quantized_formats`; None: a plain checkpoint."""
    margin: float = MIN_MARGIN
    """Least distance of the next best token where the reference's tokens are compared."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Engine besides the common ones."""
    environment: dict[str, str] = field(default_factory=dict)
    saves: bool = True
    """Whether RadixAttention is told to save keys and values."""
    server: list[str] = field(default_factory=list)
    """Python's arguments that start an HTTP server; empty: the Engine."""

    @property
    def name(self) -> str:
        format = f" ({self.format})" if self.format else ""
        return f"{self.what}{format}, {self.row.name}, {self.attention} attention"

    @property
    def backend(self) -> str:
        # SGLang accepts few backends for GPT-OSS.
        return "aiter" if self.row.model_type == "gpt_oss" else _BACKENDS[self.attention]


def _quantized(model: str) -> Tiny:
    return next(row for row in QUANTIZED_MODELS if row.name == model)


_FUSED = {"ATOM_ROPE_FUSED_QKNORM": "1"}
_BOTH = (
    *("llama-gqa", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "mixtral", "glm4-moe", "gemma3"),
    *("granite", "minimax-m2", "ministral", "ministral3", "phi3", "smollm3"),
)
_OWN = ("gpt-oss", "gemma2", "llama4", "deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash")

FAMILIES = [
    *(Case("family", tiny(name)) for name in (*_BOTH, *_OWN)),
    *(Case("family", tiny(name), HOST) for name in _BOTH),
]
"""Their results are a table of docs/use/plugins.md."""
FEATURES = [
    *(
        Case("fused norms, RoPE and write", tiny(name), environment=_FUSED, saves=False)
        for name in ("qwen3-moe", "gemma2")
    ),
    Case("pages of 16 tokens", tiny("llama-gqa"), engine={"page_size": 16}),
    Case("pages of 16 tokens", tiny("deepseek-v3"), engine={"page_size": 16}),
    *(
        Case("chunked prefill", tiny(name), engine={"chunked_prefill_size": 16})
        for name in ("qwen3", "gpt-oss", "llama4", "deepseek-v3")
    ),
]
# SGLang has these formats in bfloat16 and float16 alone, and the reference computes in float32.
_BFLOAT16 = {"dtype": "bfloat16"}
_BFLOAT16_MARGIN = 0.1
QUANTIZED = [
    Case("quantized", _quantized(model), format=format, margin=_BFLOAT16_MARGIN, engine=_BFLOAT16)
    for model, format in (
        ("llama", "compressed-tensors, channel"),
        ("llama", "compressed-tensors, INT8"),
        ("deepseek-v3", "compressed-tensors, INT8"),
    )
]
RANKS = [Case("two ranks", tiny(name), engine={"tp_size": 2}) for name in ("llama-gqa", "deepseek-v3")]
_COMMAND = "from sglang.cli.main import main; main()"
"""What the console script `sglang` runs."""
SERVERS = [
    Case("HTTP server", tiny("llama-gqa"), server=["-m", "sglang.launch_server"]),
    Case("sglang serve", tiny("qwen3"), server=["-c", _COMMAND, "serve"]),
]
