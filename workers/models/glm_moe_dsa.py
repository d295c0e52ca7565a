"""GLM-5: sparse MLA; some layers share the top-k indices of the layer before."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import SparseLatentDecoderLM

_DEFAULTS = {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "n_group": 1,
    "topk_group": 1,
}
_KINDS = {"F": "full", "S": "shared"}


class GlmMoeDsaForCausalLM(SparseLatentDecoderLM):
    """The indexer has GPT-J-style RoPE, as the attention."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__({**_DEFAULTS, **config}, build, indexer_kinds(config), interleaved=True)


def indexer_kinds(config: Mapping[str, Any]) -> list[str]:
    """By layer: "full" for one with an indexer, "shared" for one that uses the indices of the layer before.

    From indexer_types, else index_topk_pattern, else index_topk_freq and index_skip_topk_offset.
    """
    if config.get("indexer_types") is not None:
        return list(config["indexer_types"])
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [_KINDS.get(letter, letter) for letter in pattern]
    every = max(config.get("index_topk_freq", 1), 1)
    first = config.get("index_skip_topk_offset", 2)
    layers = range(config["num_hidden_layers"])
    return ["shared" if max(layer - first + 1, 0) % every else "full" for layer in layers]


MTP_FIELD = "num_nextn_predict_layers"
ARCHITECTURES = {"GlmMoeDsaForCausalLM": GlmMoeDsaForCausalLM}
