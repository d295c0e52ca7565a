"""What a decoder's step must read, multiply and keep, from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.kernel_runs.kernel_shapes import ModelShape, config_file

__all__ = ["Decoder", "decoder", "expected_experts"]

_ACT_BYTES = 2
"""Size of a weight, an activation and a value in the KV cache: bfloat16."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a whole model. Weights are counted in parameters, of one layer where a layer is named.

    Attention is counted over the whole context: sliding windows and recurrent layers are not modelled.
    """

    name: str
    shape: ModelShape
    layers: int
    dense_layers: int
    """Layers without experts; all of them in a dense model."""
    shared_experts: int
    tied: bool
    """Whether the embedding is also the head."""
    value_bytes: int = _ACT_BYTES

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> "Decoder":
        """From a config.json; KeyError for a missing size."""
        shape = ModelShape.from_config(config)
        layers = config["num_hidden_layers"]
        dense = config.get("first_k_dense_replace", 0) if shape.experts else layers
        shared = config.get("n_shared_experts") or 0
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(name, shape, layers, dense, shared, tied)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def attention(self) -> int:
        """Parameters of the projections around a layer's attention."""
        shape = self.shape
        hidden = shape.hidden
        if (latent := shape.latent) is None:
            return hidden * shape.qkv + shape.heads * shape.head_dim * hidden
        query = shape.heads * (latent.nope + latent.rope)
        queries = hidden * query if latent.query is None else latent.query * (hidden + query)
        keys = hidden * latent.row + latent.latent * shape.heads * (latent.nope + latent.value)
        return queries + keys + shape.heads * latent.value * hidden

    @property
    def dense_mlp(self) -> int:
        """Parameters of a gated MLP."""
        return 3 * self.shape.hidden * self.shape.features

    @cached_property
    def expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.shape.hidden * self.shape.expert_features

    @cached_property
    def common(self) -> int:
        """Parameters that every token uses, over all layers, and the head. Embeddings are only looked up."""
        mlps = self.dense_layers * self.dense_mlp
        routers = self.expert_layers * self.shape.hidden * self.shape.experts
        shared = self.expert_layers * self.shared_experts * self.expert
        return self.layers * self.attention + mlps + routers + shared + self.shape.hidden * self.shape.vocab

    @property
    def embedding(self) -> int:
        """Parameters of an embedding that is not also the head."""
        return 0 if self.tied else self.shape.hidden * self.shape.vocab

    @property
    def experts(self) -> int:
        """Parameters of all experts of all layers."""
        return self.expert_layers * self.shape.experts * self.expert

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.shape.hidden * self.value_bytes

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, over all layers."""
        shape = self.shape
        values = 2 * shape.kv_heads * shape.head_dim if shape.latent is None else shape.latent.row
        return self.layers * values * self.value_bytes

    @property
    def kv_copies_share(self) -> int:
        """Most tensor-parallel ranks that the KV cache can be split over; with more, it is copied."""
        return 1 if self.shape.latent is not None else self.shape.kv_heads

    def attention_flops(self, decoded: float, prefilled: float) -> float:
        """Operations of attention; the arguments count pairs of a token and a position that it sees.

        Decoding with latent attention works on the latents themselves.
        """
        shape = self.shape
        latent = shape.latent
        if latent is None:
            return 4.0 * self.layers * shape.heads * shape.head_dim * (decoded + prefilled)
        decoding = 2.0 * shape.heads * (latent.row + latent.latent) * decoded
        return self.layers * (
            decoding + 2.0 * shape.heads * (latent.nope + latent.rope + latent.value) * prefilled
        )

    def touched(self, tokens: float) -> float:
        """How many of a layer's experts run for so many tokens, if the router spreads them evenly."""
        return expected_experts(self.shape.experts, self.shape.chosen, tokens)


def expected_experts(experts: int, chosen: int, tokens: float) -> float:
    """How many of `experts` run for so many tokens of which each chooses `chosen`, all equally likely."""
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens) if experts else 0.0


def decoder(model: str) -> Decoder:
    """The decoder of a shipped configuration or of a directory with config.json. Raises BenchmarkError."""
    path = config_file(model)
    try:
        return Decoder.from_config(path.parent.name, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} does not give a decoder's sizes: {error!r}") from None
