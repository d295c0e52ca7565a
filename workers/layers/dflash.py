"""DFlash: a small decoder that drafts a whole block in one pass, from hidden states of the model.

    hidden states of tokens 0 … s - 1 ─ fc ─ hidden_norm ─ k_proj, v_proj of each layer ► its KV cache
    last id, mask, mask, …  at s, s + 1, … ─ embedding ─ layers ─ norm ─ LM head ► drafts for s + 1, s + 2, …

In its layers the tokens of a block see one another, in both directions, and all tokens before. Embedding and
LM head are the model's.

T tokens, F features of the hidden states side by side, D hidden size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.causal_lm import WeightedModel
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import (
    DecoderArgs,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    SelfAttention,
    common_fields,
    kv_groups,
)
from workers.layers.eagle3 import Projection
from workers.layers.embedding import VocabEmbedding
from workers.layers.norm import RMSNorm

_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False}
_OTHER_FORMS = ("fc_layernorm", "is_causal", "use_target_layer_norm", "markov_rank", "enable_confidence_head")
"""Fields of drafters of another structure."""


class BlockDraftModel(WeightedModel):
    """The drafter of a target model."""

    packed_modules_mapping: ClassVar = DecoderLM.packed_modules_mapping

    def __init__(self, config: Mapping[str, Any], target: DecoderLM, build: BuildContext):
        """`config` is the drafter's config.json.

        Raises KeyError (missing field) or ValueError (unsupported).
        """
        super().__init__()
        config = {**_DEFAULTS, **config}
        own = config["dflash_config"]
        _check_supported(config, own, target)
        self.mask_id: int = own["mask_token_id"]
        self.block_size: int = own.get("block_size") or config["block_size"]
        self.aux_layers = aux_layers(own, len(target.model.layers))
        bias = config["attention_bias"]
        args = DecoderArgs(**common_fields(config), qkv_bias=bias, o_bias=bias, qk_norm=True)
        hidden = args.hidden_size
        groups = kv_groups(args, build)
        self.kv_groups = [*groups]
        self.fc = Projection(len(self.aux_layers) * hidden, hidden, build)
        self.hidden_norm = RMSNorm(hidden, args.rms_norm_eps, build)
        layers = []
        for layer in range(args.num_hidden_layers):
            at = build.at(f"layers.{layer}")
            attention = SelfAttention(args, layer, groups, at.at("self_attn"))
            layers.append(DecoderLayer(args, attention, GatedMLP(args, at.at("mlp")), build))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, args.rms_norm_eps, build)
        self.rotary = RotaryEmbedding(args.head_dim, args.rope_parameters, build)
        self.unused_on_disk = ("*.rotary_emb.inv_freq", "embed_tokens.*", "lm_head.*")
        self._embed: list[VocabEmbedding] = [target.model.embed_tokens]  # not a module of this model

    def follow(self, aux_TF: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> None:
        """Cache the keys and values of tokens from the model's hidden states at `aux_layers`."""
        features_TD = self.hidden_norm(self.fc(aux_TF))
        rotation = self.rotary(positions_T)
        for layer in self.layers:
            attention = layer.self_attn
            assert isinstance(attention, SelfAttention)
            attention.attend(attention.qkv_proj(features_TD), rotation, ctx)  # its output is not used

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Normalised hidden states [T, D] of the tokens of blocks."""
        x_TD: torch.Tensor = self._embed[0](ids_T)
        residual_TD: torch.Tensor | None = None
        rotation = self.rotary(positions_T)
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, rotation, ctx)
        normed_TD, _ = self.norm.add_norm(x_TD, residual_TD)
        return normed_TD


def aux_layers(own: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers of the model whose inputs the drafter reads: those after `target_layer_ids`.

    Raises ValueError for layers that the model does not have.
    """
    layers = [layer + 1 for layer in own["target_layer_ids"]]
    if not layers or len({*layers}) != len(layers) or not all(0 < layer < num_layers for layer in layers):
        raise ValueError(
            f"a block drafter of target_layer_ids {own['target_layer_ids']} needs distinct layers below the "
            f"last one of a model of {num_layers}"
        )
    return layers


def _check_supported(config: Mapping[str, Any], own: Mapping[str, Any], target: DecoderLM) -> None:
    """Raises ValueError for drafters of another structure."""
    for name in _OTHER_FORMS:
        if own.get(name) or config.get(name):
            raise ValueError(f"a block drafter with {name} is not supported")
    kinds = {*(config.get("layer_types") or ["full_attention"])}
    if kinds != {"full_attention"}:
        raise ValueError(
            f"a block drafter with layer_types {sorted(kinds)} is not supported; full_attention is"
        )
    if own.get("input_embedding_scale", config.get("input_embedding_scale", 1.0)) != 1.0:
        raise ValueError("a block drafter with input_embedding_scale is not supported")
    if config["hidden_size"] != target.model.hidden_size:
        raise ValueError(
            f"a block drafter of hidden size {config['hidden_size']} cannot use the model's embedding, of "
            f"{target.model.hidden_size}"
        )
    if not 0 <= own["mask_token_id"] < config["vocab_size"]:
        raise ValueError(
            f"mask_token_id {own['mask_token_id']} is outside the vocabulary of {config['vocab_size']}"
        )
