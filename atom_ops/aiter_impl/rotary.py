"""RoPE with the tokens' cosines and sines."""

from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.ops.attention.rotary import rotary

# AITER's rotate_style: GPT-NeoX rotates feature i with i + R / 2, GPT-J with its neighbour.
_HALVES = 0
_PAIRS = 1


@rotary.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_THE, cos_T1R, sin_T1R, interleaved=False: takes(x_THE) and x_THE.dim() == 3,
)
def _rotary(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False) -> Tensor:
    import aiter

    # AITER takes one cosine and one sine of each pair; ours are repeated, the first sine of a pair negated.
    half = cos_T1R.shape[-1] // 2
    cos = cos_T1R[..., :half]
    sin = sin_T1R[..., half:]
    if interleaved:
        cos = cos_T1R[..., ::2]
        sin = sin_T1R[..., 1::2]
    out: Tensor = aiter.rope_cached_fwd(
        input=x_THE.contiguous().unsqueeze(1),  # sequence, batch, heads, features
        cos=cos.contiguous().unsqueeze(1),
        sin=sin.contiguous().unsqueeze(1),
        rotate_style=_PAIRS if interleaved else _HALVES,
        reuse_freqs_front_part=True,
        nope_first=False,
    )
    return out.squeeze(1)
