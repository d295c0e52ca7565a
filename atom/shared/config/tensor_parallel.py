"""Which tensor-parallel sizes a model's heads allow."""

from collections.abc import Mapping
from typing import Any

from atom.shared.config.fields import ConfigError

__all__ = ["check_tensor_parallel", "heads_fit"]


def heads_fit(size: int, heads: int, kv_heads: int) -> bool:
    """Whether every one of `size` ranks gets query heads and their key/value heads.

    Up to the number of key/value heads, ranks get whole groups. More ranks share them: each key/value head
    is on the same number of ranks.
    """
    return size <= kv_heads or (size % kv_heads == 0 and size <= heads)


def check_tensor_parallel(size: int, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if a rank would get no heads; it names the sizes next to `size` that fit.

    `model` is the content of config.json.
    """
    refused = _refused(size, model)
    if not refused:
        return
    fitting = [each for each in range(1, model["num_attention_heads"] + 1) if not _refused(each, model)]
    below = [each for each in fitting if each < size][-1:]
    above = [each for each in fitting if each > size][:1]
    raise ConfigError(
        f"--tensor-parallel-size {size} does not fit the model's {refused}: use "
        + " or ".join(map(str, below + above))
    )


def _refused(size: int, model: Mapping[str, Any]) -> str:
    """The heads that `size` ranks cannot share; empty if they can."""
    heads = model.get("num_attention_heads", size)
    if groups := model.get("o_groups"):  # DeepSeek-V4: all ranks have its key/value head
        return f"{groups} o_groups" if size > groups else ""
    # Latents of MLA are on every rank.
    kv_heads = heads if model.get("kv_lora_rank") else model.get("num_key_value_heads") or heads
    if not heads_fit(size, heads, kv_heads):
        return f"{heads} query and {kv_heads} key/value heads"
    linear = model.get("linear_num_key_heads") or _kimi_heads(model)
    return f"{linear} heads of linear attention" if linear and size > linear else ""


def _kimi_heads(model: Mapping[str, Any]) -> int | None:
    """Heads of Kimi Linear's recurrent layers."""
    return (model.get("linear_attn_config") or {}).get("num_heads") or model.get("linear_num_heads")
