"""A kernel that stores the uniform numbers of Triton's sampler."""

import triton
import triton.language as tl

from atom_ops.triton_impl.sampling.sampling import token_uniforms


@triton.jit
def store_uniforms(seed, sequence, position, out):
    """The numbers of the first 4096 tokens, to `out`; the other arguments point to one int64 each."""
    key = (tl.load(seed), tl.load(sequence), tl.load(position))
    at = tl.arange(0, 16)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(out + at, token_uniforms(key, tl.arange(0, 16), 0))
