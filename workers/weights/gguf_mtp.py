"""The layer for multi-token prediction of a GGUF file: one more layer, and what joins it to the others.

    llama.cpp                     after the others             apart (Qwen3-Next, Qwen3.5)
    blk.L.nextn.enorm             model.layers.L.enorm         mtp.pre_fc_norm_embedding
    blk.L.nextn.hnorm             model.layers.L.hnorm         mtp.pre_fc_norm_hidden
    blk.L.nextn.eh_proj           model.layers.L.eh_proj       mtp.fc
    blk.L.nextn.shared_head_norm  …L.shared_head.norm          mtp.norm
    blk.L.*                       model.layers.L.*             mtp.layers.0.*

L is the number of the other layers. Copies of the embedding and the LM head, which some files have, are not
read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from workers.weights.gguf_families import mtp_tensors
from workers.weights.gguf_tensors import Maker, Part

_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MORE = {"layer_types": "full_attention", "indexer_types": "full"}
"""What lists of each layer's kind have for that layer."""


def with_mtp_layer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model with one more layer, of the kind that predicts."""
    more = {name: [*settings[name], kind] for name, kind in _MORE.items() if name in settings}
    return {**settings, "num_hidden_layers": settings["num_hidden_layers"] + 1, **more}


def copies(layer: int) -> frozenset[str]:
    """The tensors of the layer that are not read."""
    return frozenset(f"blk.{layer}.nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head"))


def mtp_parts(maker: Maker, longer: Any, apart: bool) -> Iterator[Part]:
    """All tensors of the last layer of `longer`, and its own.

    Raises ValueError for one that the file lacks.
    """
    layer, hidden = longer.config.num_hidden_layers - 1, longer.config.hidden_size
    at = f"model.layers.{layer}."
    weights = {name: tensor for name, tensor in longer.state_dict().items() if name.startswith(at)}
    parts = list(maker.parts(weights))
    for name, stored in zip(_OWN, mtp_tensors(layer), strict=True):
        shape = (hidden, 2 * hidden) if name == "eh_proj" else (hidden,)
        parts += maker.make(f"{at}{name}.weight", shape, stored)
    others = {f"{at}{own}.weight": f"mtp.{name}.weight" for own, name in zip(_OWN, _APART, strict=True)}
    for part in parts:
        name = others.get(part.name) or part.name.replace(at, "mtp.layers.0.")
        yield replace(part, name=name) if apart else part
