"""DFlash: a small decoder that drafts a whole block in one pass, from hidden states of the model.

    hidden states of tokens 0 … s - 1 ─ fc ─ hidden_norm ─ k_proj, v_proj of each layer ► its KV cache
    last id, mask, mask, …  at s, s + 1, … ─ embedding ─ layers ─ norm ─ LM head ► drafts for s + 1, s + 2, …

In its layers the tokens of a block see one another, in both directions, and all tokens before; or only those
before them, or those of a sliding window. Embedding and LM head are the model's, or the drafter's own, whose
vocabulary may be smaller (d2t maps it to the model's).

T tokens, R rows of K drafts, F features of the hidden states side by side, D hidden size.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from atom_ops import SamplingBatch
from workers.checkpoint.draft_configs import BlockAttention, block_attention, block_fields, block_layers
from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.attention.self_attention import SelfAttention, kv_groups
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_layer import DecoderLayer
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.hidden_states_reader import HiddenStatesReader
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.vocabulary_map import VocabularyMap


class BlockDraftModel(HiddenStatesReader):
    """The drafter of a target model."""

    packed_modules_mapping: ClassVar = DecoderLM.packed_modules_mapping
    first_draft: ClassVar[int] = 1
    """The place in a block of the hidden state that gives the first draft: a mask's gives its own."""

    def __init__(self, config: Mapping[str, Any], target: DecoderLM, names: Set[str], build: BuildContext):
        super().__init__(config, target, names, build)
        config = block_fields(config)
        self.mask_id: int = config["mask_token_id"]
        self.aux_layers = block_layers(config)
        self.renamed_on_disk = {"vocabulary": ""}  # type: ignore[misc]
        build = replace(build, renamed=self.renamed_on_disk)
        bias = config["attention_bias"]
        seen = block_attention(config)
        args = DecoderArgs(
            **common_fields(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=tuple(layer.window for layer in seen),
            sees_ahead=any(layer.window is not None and not layer.causal for layer in seen),
        )
        hidden = args.hidden_size
        groups = kv_groups(args, build)
        self.kv_groups = [*groups]
        self.seen_in_groups: list[BlockAttention] = [seen[group.layers[0]] for group in groups]
        self.fc = ReplicatedLinear(len(self.aux_layers) * target.model.hidden_size, hidden, build)
        self.hidden_norm = RMSNorm(hidden, args.rms_norm_eps, build)
        layers = []
        for layer in range(args.num_hidden_layers):
            at = build.at(f"layers.{layer}")
            attention = SelfAttention(args, layer, groups, at.at("self_attn"))
            layers.append(DecoderLayer(args, attention, GatedMLP(args, at.at("mlp")), build))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, args.rms_norm_eps, build)
        self.rotary = RotaryEmbedding(args.head_dim, args.rope_parameters, build)
        own = config.get("draft_vocab_size") or args.vocab_size
        self.vocabulary = VocabularyMap(own, build) if own != args.vocab_size else None
        self.unused_on_disk = ("t2d", *(() if self.vocabulary else ("d2t",)), "*.rotary_emb.inv_freq")
        self._embed = [target.model.embed_tokens]  # not a module of this model
        self.embed_tokens: VocabEmbedding | None = None
        if "embed_tokens.weight" in names:
            self.embed_tokens = VocabEmbedding(args.vocab_size, hidden, build.at("embed_tokens"))
            self._embed = [self.embed_tokens]
        self._logits: Callable[[torch.Tensor], torch.Tensor] = target.compute_logits
        self._sample = target.sample
        self.lm_head: LMHead | None = None
        if "lm_head.weight" in names or self.vocabulary is not None:
            self.lm_head = LMHead(own, hidden, build.at("lm_head"), None)
            self._logits = self.lm_head.forward
            self._sample = self.lm_head.sample

    @property
    def read_for_each_draft(self) -> list[nn.Module]:
        """What `sample` computes once for each draft of a row."""
        return []

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

    def sample(
        self,
        hidden_RKD: torch.Tensor,
        last_ids_R: torch.Tensor,
        settings: SamplingBatch,
        positions_RK: torch.Tensor,
    ) -> torch.Tensor:
        """The drafts (int64) after each row's last id, at these positions; `settings` of the rows."""
        rows, drafts = positions_RK.shape
        repeated = settings.repeated(drafts)
        ids_S = self._sample(hidden_RKD.flatten(0, 1), repeated, positions_RK.flatten())
        if self.vocabulary is not None:
            ids_S = self.vocabulary(ids_S)
        return ids_S.view(rows, drafts)
