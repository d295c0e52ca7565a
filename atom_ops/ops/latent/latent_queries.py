"""From the latents of MLA to its queries: norms, the write to the KV cache, and the projection."""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.rotary import rotation
from atom_ops.ops.latent.latent_cache import (
    LatentLayer,
    LatentNorms,
    make_latent_layer,
    norm_and_write_latents,
)
from atom_ops.ops.linear.linear import linear
from atom_ops.tolerances import REDUCTION
from atom_ops.weights import Weight
from atom_ops.weights.samples import ROUNDED, Format, random_weight


def _case(tokens: int, q_width: int, outputs: int, format: Format = "plain") -> Case:
    latent = 32
    rope = 8

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, LatentNorms, Tensor, Tensor, LatentLayer, Tensor, Weight]:
        latents = torch.randn(tokens, q_width + latent + rope, generator=generator).to(dtype)
        weights = torch.rand(q_width + latent, generator=generator).to(dtype)
        angles = torch.rand(tokens, 1, rope // 2, generator=generator) * 6.3
        cache = make_latent_layer(-(-tokens // 4) + 1, 4, latent, rope, dtype, torch.device("cpu"))
        slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
        norms = LatentNorms(weights[:q_width], weights[q_width:], 1e-6)
        weight = random_weight((outputs, q_width), format, dtype, generator)
        return latents, norms, *rotation(angles.cos(), angles.sin()), cache, slots, weight

    return Case(f"{tokens}x{q_width}x{outputs}-{format}", make, ROUNDED.get(format))


@op([_case(3, 64, 48), _case(5, 128, 96, "block_fp8")], REDUCTION, composed=True)
def latent_queries(
    latents_TN: Tensor,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    weight: Weight,
    interleaved: bool = False,
) -> Tensor:
    """`norm_and_write_latents`, then `linear` of the queries' latents, [T, O]."""
    q_TQ = norm_and_write_latents(latents_TN, norms, cos_T1R, sin_T1R, cache, slots_T, interleaved)
    return linear(q_TQ, weight)
