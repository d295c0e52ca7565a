"""Scales of the KV cache that checkpoints hold, under all names that are in use."""

import re

_NAMES = re.compile(
    r"\.(self_attn|attention)\.("
    r"((attn|k_proj|v_proj|qkv_proj|kv_b_proj)\.)?(k|v|kv|q|prob|prob_output)_scale"
    r"|(k|v|kv_b|qkv)_proj\.output_scale"
    r")$"
)


def is_cache_scale(name: str) -> bool:
    """Whether the tensor with this name scales cached keys or values, queries or probabilities.

    A float8 cache here has a scale for each token and head (for each token of latents), which is never
    coarser than one for a layer: these are not needed.
    """
    return _NAMES.search(name) is not None
