"""The config.json of drafters that read the target's hidden states, and whether they fit the target.

They are EAGLE-3 heads, DFlash and DSpark drafters. Some fields may be in `eagle_config` or `dflash_config`
instead of the top level. The speculators library has the fields of an EAGLE-3 head's layer in
`transformer_layer_config`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

_EAGLE3_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "num_hidden_layers": 1,
    "norm_before_residual": False,
    "norm_output": False,
    "fc_norm": False,
    "norm_before_fc": False,
}
LLAMA = "LlamaForCausalLM"
"""The architecture of whole models, and of the first heads: those state draft_vocab_size."""
LATENT_EAGLE3 = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
"""Architectures of EAGLE-3 heads with multi-head latent attention."""
SPECULATORS_EAGLE3 = ("Eagle3Speculator", "Eagle3DraftModel")
"""Architectures that the speculators library writes."""
_BLOCK_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "max_window_layers": 28}
_EAGLE3_VALUES = {
    "use_aux_hidden_state": True,
    "parallel_drafting": False,
    "use_mtp_layernorm": False,
    "use_sliding_window": False,
}
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DFLASH_VALUES = {
    "input_embedding_scale": 1.0,
    "fc_layernorm": False,
    "use_target_layer_norm": False,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
}
"""Fields by which drafters of another structure differ, with their values in this one."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DSPARK_VALUES = {
    "model_type": "qwen3",
    "speculators_model_type": None,
    "markov_head_type": "vanilla",
    "sample_from_anchor": True,
    "shift_label": True,
    "use_swa": False,
    "causal": False,
    "dflash_query_causal": False,
    "log_snr_conditioning": False,
    "dspark_backbone_conv_enabled": False,
}


def eagle3_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a head, with defaults."""
    inner = config.get("eagle_config") or {}
    stated = {name: value for name, value in config.items() if value is not None or name not in inner}
    return {**_EAGLE3_DEFAULTS, **inner, **stated}


def with_layer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's config.json with the fields of `transformer_layer_config` at the top level.

    Raises ValueError for a layer that is none of Llama's.
    """
    layer = config.get("transformer_layer_config") or {}
    if (kind := layer.get("model_type", "llama")) != "llama":
        raise ValueError(f"its transformer_layer_config has model_type {kind!r}; llama is supported")
    return {**layer, **config, "model_type": "llama"}


def block_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a block drafter, with defaults."""
    return {**_BLOCK_DEFAULTS, **config, **(config.get("dflash_config") or {})}


def eagle3_layers(fields: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers whose inputs the head reads: those of its config, or a low, a middle and a high one."""
    return list(fields.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3))


def block_layers(fields: Mapping[str, Any]) -> list[int]:
    """The layers of the model whose inputs the drafter reads: those after `target_layer_ids`."""
    return [layer + 1 for layer in fields["target_layer_ids"]]


@dataclass(frozen=True)
class BlockAttention:
    """What the tokens of a block see in one layer."""

    window: int | None
    """A sliding window of so many tokens, which ends at the token itself; None: all tokens before."""
    causal: bool
    """Whether they see only the block's tokens before them; else all of the block."""


def block_attention(fields: Mapping[str, Any]) -> list[BlockAttention]:
    """Each layer's, of `block_fields`. Raises ValueError for inconsistent ones.

    `layer_types` names the layers with a window, or max_window_layers with use_sliding_window the first of
    them, or else `use_swa` gives all layers one. If neither `is_causal` nor `causal` says it, the layers that
    are sliding by their type are causal.
    """
    layers = fields["num_hidden_layers"]
    types = _layer_types(fields, layers)
    is_causal = next(
        (found for name in ("is_causal", "causal") if (found := fields.get(name)) is not None), None
    )
    slides = [kind == _SLIDING for kind in types]
    windowed = [True] * layers if fields.get("use_swa") and not any(slides) else slides
    window = _window(fields) if any(windowed) else None
    return [
        BlockAttention(
            window if has_window else None, bool(is_causal) if is_causal is not None else slides_too
        )
        for has_window, slides_too in zip(windowed, slides, strict=True)
    ]


def _layer_types(fields: Mapping[str, Any], layers: int) -> list[str]:
    types = fields.get("layer_types")
    if types is None:
        first = fields["max_window_layers"] if fields.get("use_sliding_window") else layers
        types = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not {*types} <= {_FULL, _SLIDING}:
        raise ValueError(
            f"layer_types {types!r} are not {_FULL} or {_SLIDING} for each of its {layers} layers"
        )
    return types


def _window(fields: Mapping[str, Any]) -> int:
    """That of the layers with one."""
    name = "swa_window_size"
    if fields.get(name) is None:
        name = "sliding_window"
        if fields.get("use_sliding_window") is False:
            raise ValueError("layers have a sliding window, but use_sliding_window is false")
    window = fields.get(name)
    if type(window) is not int or window < 1:
        raise ValueError(f"layers have a sliding window, and {name} {window!r} is no whole number from 1")
    return window


@dataclass(frozen=True)
class Target:
    """What a drafter must fit: the model's sizes, and --num-speculative-tokens."""

    hidden_size: int
    num_layers: int
    drafts: int


def check_fit(method: str, config: Mapping[str, Any], target: Target) -> None:
    """Raise ValueError, in one line, for a drafter of another structure, or for another target."""
    try:
        _CHECKS[method](config, target)
    except KeyError as error:
        raise ValueError(f"its config.json lacks {error}") from None


def check_embedding(
    config: Mapping[str, Any], target: Mapping[str, Any], names: Set[str], uses_head: bool = False
) -> None:
    """Raise ValueError for a drafter, with tensors of these names, that cannot use the target's embedding.

    `uses_head`: whether it uses the target's LM head too, unless it has one.
    """
    hidden, of_target = config["hidden_size"], target["hidden_size"]
    parts = {"embed_tokens.weight": "embedding", **({"lm_head.weight": "LM head"} if uses_head else {})}
    for name, part in parts.items():
        if hidden != of_target and name not in names:
            raise ValueError(
                f"it has hidden size {hidden} and no {name}, so it needs the model's {part}, "
                f"whose size is {of_target}: use a drafter with {name} of its own"
            )


def check_vocabulary(config: Mapping[str, Any], names: Set[str]) -> None:
    """Raise ValueError for a block drafter of a smaller vocabulary that lacks tensors, by their `names`."""
    own = config.get("draft_vocab_size") or config["vocab_size"]
    missing = sorted({"d2t", "lm_head.weight"} - names) if own != config["vocab_size"] else []
    if missing:
        raise ValueError(
            f"it drafts {own} of the {config['vocab_size']} tokens (draft_vocab_size) and lacks the tensors "
            f"{', '.join(missing)}: use a drafter that has them"
        )


def _check_eagle3(config: Mapping[str, Any], target: Target) -> None:
    fields = eagle3_fields(config)
    if fields["num_hidden_layers"] != 1:
        raise ValueError(f"it has {fields['num_hidden_layers']} layers; EAGLE-3 heads of one are supported")
    _check_values(fields, _EAGLE3_VALUES)
    if fields["fc_norm"] and fields["norm_before_fc"]:
        raise ValueError("fc_norm and norm_before_fc exclude each other: hidden states are normalised once")
    _check_layer_types(fields)
    is_latent = fields["architectures"][0] in LATENT_EAGLE3
    if missing := [name for name in _LATENT_FIELDS if is_latent and name not in fields]:
        raise ValueError(f"its config.json lacks {', '.join(missing)}")
    name = "target_hidden_size" if fields.get("target_hidden_size") else "hidden_size"
    _check_hidden_size(name, fields, target)
    layers = eagle3_layers(fields, target.num_layers)
    count = fields.get("num_aux_hidden_states") or len(layers)
    if not _are_layers(layers, target) or len(layers) != count:
        raise ValueError(
            f"it reads the inputs of layers {layers} (eagle_aux_hidden_state_layer_ids), which are not "
            f"{count} distinct ones (num_aux_hidden_states) of the model's {target.num_layers}, "
            f"0 to {target.num_layers - 1}: use a head that was trained for this model"
        )


def _check_dflash(config: Mapping[str, Any], target: Target) -> None:
    fields = block_fields(config)
    _check_values(fields, _DFLASH_VALUES)
    if fields.get("speculators_model_type"):
        raise ValueError("it is in the format of the speculators library, which is not supported for dflash")
    name = "target_hidden_size" if fields.get("target_hidden_size") else "hidden_size"
    _check_hidden_size(name, fields, target)
    own = fields.get("draft_vocab_size")
    if own is not None and (type(own) is not int or not 1 <= own <= fields["vocab_size"]):
        raise ValueError(f"draft_vocab_size {own!r} is no whole number from 1 to {fields['vocab_size']}")
    _check_block(fields, target, first_draft=1)
    for layer, seen in enumerate(block_attention(fields)):
        if seen.window is not None and not seen.causal and seen.window < fields["block_size"]:
            raise ValueError(
                f"layer {layer} has a window of {seen.window} tokens, less than a block (block_size "
                f"{fields['block_size']}), all of which it sees; this is not supported"
            )


def _check_dspark(config: Mapping[str, Any], target: Target) -> None:
    fields = block_fields(config)
    _check_values(fields, _DSPARK_VALUES)
    _check_layer_types(fields)
    _check_hidden_size("hidden_size", fields, target)
    _check_count("markov_rank", fields)
    vocabulary, own = fields["vocab_size"], fields.get("draft_vocab_size")
    if (own or vocabulary) != vocabulary:
        raise ValueError(f"a vocabulary of its own, of draft_vocab_size {own}, is not supported")
    _check_block(fields, target, first_draft=0)


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], Target], None]] = {
    "eagle3": _check_eagle3,
    "dflash": _check_dflash,
    "dspark": _check_dspark,
}


def _check_block(fields: Mapping[str, Any], target: Target, first_draft: int) -> None:
    """`first_draft`: its place in a block."""
    vocabulary = fields["vocab_size"]
    mask = fields["mask_token_id"]
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ValueError(f"mask_token_id {mask!r} is outside the vocabulary of {vocabulary}")
    _check_count("block_size", fields)
    if (most := fields["block_size"] - first_draft) < target.drafts:
        raise ValueError(
            f"its blocks have at most {most} drafts (block_size {fields['block_size']}), and "
            f"--num-speculative-tokens is {target.drafts}"
        )
    ids = fields["target_layer_ids"]
    known = isinstance(ids, list) and all(type(each) is int for each in ids)
    if not known or not _are_layers(block_layers(fields), target):
        raise ValueError(
            f"target_layer_ids {ids!r} are not distinct layers below the last one of the model's "
            f"{target.num_layers}, 0 to {target.num_layers - 2}: use a drafter trained for this model"
        )


def _check_layer_types(fields: Mapping[str, Any]) -> None:
    kinds = {*(fields.get("layer_types") or ["full_attention"])}
    if kinds != {"full_attention"}:
        raise ValueError(f"layer_types {sorted(kinds)} are not supported; full_attention is")


def _check_values(fields: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if (found := fields.get(name)) is not None and found != value:
            raise ValueError(f"{name} {found!r} is not supported")


def _check_count(name: str, fields: Mapping[str, Any]) -> None:
    if type(fields[name]) is not int or fields[name] < 1:
        raise ValueError(f"{name} {fields[name]!r} is not supported; a whole number from 1 is")


def _check_hidden_size(name: str, fields: Mapping[str, Any], target: Target) -> None:
    if fields[name] != target.hidden_size:
        raise ValueError(
            f"it reads hidden states of size {fields[name]} ({name}), and the model's have "
            f"{target.hidden_size}: use a drafter that was trained for this model"
        )


def _are_layers(layers: Sequence[Any], target: Target) -> bool:
    """Whether they are distinct layers of the target, and there is one at least."""
    known = all(type(layer) is int and 0 <= layer < target.num_layers for layer in layers)
    return known and len({*layers}) == len(layers) > 0
