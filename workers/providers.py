"""The ops' providers, as the environment wants them.

A fusion is a provider of a composed op. A switch that separates it leaves out the op's providers, so that the
op calls its parts, which have providers of their own. Models and layers have no switches.
"""

from dataclasses import dataclass

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.utils import envs
from atom_ops import backend

_LLAMA = ("llama",)
_DEEPSEEK = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "mistral4",
    "kimi_k2",
    "kimi_k25",
)
_QWEN3_MOE = ("qwen3_moe",)


@dataclass(frozen=True, slots=True)
class _Fusion:
    """A variable that separates ops of some model families when it is off."""

    variable: str
    model_types: tuple[str, ...]
    ops: tuple[str, ...]
    """Composed ops that then run as their parts."""
    for_quantized: bool = False
    """Whether it concerns quantized checkpoints alone."""

    def separates(self, checkpoint: Checkpoint, quantized: bool) -> bool:
        """Whether the ops of this model run as their parts."""
        concerned = checkpoint.model_type in self.model_types and (quantized or not self.for_quantized)
        return concerned and not getattr(envs, self.variable)


_FUSIONS = (
    _Fusion("ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT", _LLAMA, ("add_norm_linear",), True),
    _Fusion("ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT", _LLAMA, ("silu_and_mul_linear",)),
    _Fusion("ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION", _DEEPSEEK, ("add_norm_linear",), True),
    _Fusion("ATOM_ENABLE_DS_QKNORM_FUSION", _DEEPSEEK, ("latent_queries", "norm_and_write_latents")),
    _Fusion("ATOM_ENABLE_DS_QKNORM_QUANT_FUSION", _DEEPSEEK, ("latent_queries",)),
)


def resolve_ops(
    device: torch.device, config: EngineConfig, checkpoint: Checkpoint
) -> dict[str, tuple[str, ...]]:
    """Set every op's providers for this model on `device`; returns and raises as `backend.resolve` does."""
    quantized = bool(checkpoint.hf_config.get("quantization_config") or config.model.online_quant_config)
    return backend.resolve(
        device,
        batch_invariant=config.device.batch_invariant,
        preferred=("aiter_triton",) if envs.ATOM_USE_TRITON_GEMM else (),
        separated=separated_ops(checkpoint, quantized),
        without_attention=("aiter",) if _wants_own_attention(checkpoint) else (),
    )


def separated_ops(checkpoint: Checkpoint, quantized: bool) -> list[str]:
    """The composed ops that the environment wants to run as their parts in this model."""
    return [op for each in _FUSIONS if each.separates(checkpoint, quantized) for op in each.ops]


def _wants_own_attention(checkpoint: Checkpoint) -> bool:
    """Whether head norms, RoPE and the write to the KV cache have to be one kernel, which AITER lacks."""
    return checkpoint.model_type in _QWEN3_MOE and (
        envs.ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION or envs.ATOM_ROPE_FUSED_QKNORM
    )
