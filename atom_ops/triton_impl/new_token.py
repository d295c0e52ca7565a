"""RoPE and the KV cache write at the start of the decode attention kernel.

A head is loaded twice, the second time with its halves exchanged, so that RoPE is two multiplications.
"""

import triton
import triton.language as tl


@triton.jit
def _exchanged(feature_E, WIDTH: tl.constexpr):
    return tl.where(feature_E < WIDTH // 2, feature_E + WIDTH // 2, feature_E - WIDTH // 2)


@triton.jit
def rope_heads(heads_M, wanted_M, cos, sin, norm_weight, eps, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr):
    """The heads at pointers `heads_M` with RoPE, normalised before it if there is a weight; [M, E]."""
    feature_E = tl.arange(0, BLOCK_E)
    other_E = _exchanged(feature_E, WIDTH)
    inside_E = feature_E < WIDTH
    wanted_ME = wanted_M[:, None] & inside_E[None, :]
    x_in_ME = tl.load(heads_M[:, None] + feature_E[None, :], mask=wanted_ME, other=0.0)
    x_ME = x_in_ME.to(tl.float32)
    other_ME = tl.load(heads_M[:, None] + other_E[None, :], mask=wanted_ME, other=0.0).to(tl.float32)
    cos_E = tl.load(cos + feature_E, mask=inside_E, other=0.0)
    sin_E = tl.load(sin + feature_E, mask=inside_E, other=0.0)
    if norm_weight is not None:
        weight_E = tl.load(norm_weight + feature_E, mask=inside_E, other=0.0).to(tl.float32)
        other_weight_E = tl.load(norm_weight + other_E, mask=inside_E, other=0.0).to(tl.float32)
        scale_M = tl.rsqrt(tl.sum(x_ME * x_ME, 1) / WIDTH + eps)
        x_ME = x_ME * scale_M[:, None] * weight_E[None, :]
        other_ME = other_ME * scale_M[:, None] * other_weight_E[None, :]
    return (x_ME * cos_E[None, :] + other_ME * sin_E[None, :]).to(x_in_ME.dtype)


@triton.jit
def write_new_token(
    token, slot, kv, head, token_stride, half_stride, head_stride, cos, sin, norm_weight, eps,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store key (with RoPE) and value of key/value head `head`; this program may read them afterwards.

    `token` points to the token's projection. Nothing is stored for a negative slot.
    """
    feature_E = tl.arange(0, BLOCK_E)
    inside_E = (feature_E < WIDTH) & (slot >= 0)
    heads = tl.num_programs(0)
    key = token + (heads * GROUP + head) * WIDTH
    one_M = tl.zeros((1,), tl.int32)
    key_ME = rope_heads(key + one_M, one_M == 0, cos, sin, norm_weight, eps, WIDTH, BLOCK_E)
    value_E = tl.load(key + heads * WIDTH + feature_E, mask=inside_E, other=0.0)
    target = kv + slot * token_stride + head * head_stride
    tl.store((target + one_M)[:, None] + feature_E[None, :], key_ME, mask=inside_E[None, :])
    tl.store(target + half_stride + feature_E, value_E, mask=inside_E)
    # Orders this program's stores before its later loads.
    tl.debug_barrier()
