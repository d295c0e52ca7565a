"""The norm of the queries' latents also rounds them for their projection; the other norm writes the cache."""

from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on
from atom_ops.aiter_impl.fused_linear import norm_linear, norm_supports
from atom_ops.ops.latent.latent_cache import LatentLayer, LatentNorms, write_latent
from atom_ops.ops.latent.latent_queries import latent_queries
from atom_ops.weights import ShuffledFP8, ShuffledMXFP4


@latent_queries.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda latents_TN, norms, cos_T1R, sin_T1R, cache, slots_T, weight, interleaved=False: (
        norm_supports(latents_TN[:, : len(norms.q_weight_Q)], None, norms.q_weight_Q, norms.eps, weight)
    ),
    batch_invariant=False,
    quantizes_activations=True,
)
def _queries(
    latents_TN: Tensor,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    weight: ShuffledFP8 | ShuffledMXFP4,
    interleaved: bool = False,
) -> Tensor:
    q_TQ, row_TK = latents_TN.tensor_split([len(norms.q_weight_Q)], 1)
    write_latent(row_TK, norms.kv_weight_C, norms.eps, cos_T1R, sin_T1R, cache, slots_T, interleaved)
    q_TO, _ = norm_linear(q_TQ, None, norms.q_weight_Q, norms.eps, weight)
    return q_TO
