"""The method fbgemm_fp8, as Meta's Llama FP8 checkpoints: FP8 per channel, bounded scales per token."""

from collections.abc import Mapping
from typing import Any

from workers.layers.quantization.channel_fp8 import channel_fp8
from workers.layers.quantization.rules import Rules, as_written, excluded

_BOUND = 1200.0


def rules(stated: Mapping[str, Any]) -> Rules:
    """Everything per channel, but for the modules that are not converted."""
    bound = stated.get("activation_scale_ub", _BOUND)
    if type(bound) not in (int, float) or not 0 < bound < float("inf"):
        raise ValueError(f"activation_scale_ub {bound!r:.40}, not a positive number")
    return Rules(channel_fp8(float(bound)), excluded(stated, ("modules_to_not_convert",), as_written))
