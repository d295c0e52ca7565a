"""A decoder: embedding, layers, last norm and LM head.

T tokens, R sampling rows, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn

from atom_ops import SamplingBatch
from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.attention.self_attention import SelfAttention, kv_groups
from workers.layers.causal_lm import OTHER_MODALITIES, CausalLM
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import overlap
from workers.layers.decoder.aux_states import AuxStates
from workers.layers.decoder.blocks import FeedForward, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.decoder.decoder_layer import DecoderLayer, hidden_norm
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.norm import add_norms
from workers.vision.tower import VisionTower

# Old checkpoints store what is computed from config.json.
_ROPE_TABLES = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")


class DecoderModel(nn.Module):
    """Maps token ids to normalised hidden states."""

    aux: AuxStates | None = None
    """Set for a drafting model that reads the inputs of layers."""

    def __init__(self, args: DecoderArgs, layers: Sequence[DecoderLayer], build: BuildContext):
        super().__init__()
        self.embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size, build.at("model.embed_tokens"))
        self.layers = nn.ModuleList(layers)
        self.norm = hidden_norm(args, build, args.logits_scale)
        self.visual: VisionTower | None = None
        ropes = args.ropes or (args.rope_parameters,) * args.num_hidden_layers
        distinct = [rope for layer, rope in enumerate(ropes) if rope not in ropes[:layer]]
        self.rotary = nn.ModuleList(
            RotaryEmbedding(args.head_dim, rope, build, args.rope_interleaved) for rope in distinct
        )
        self.hidden_size = args.hidden_size
        self._embedding_scale = args.embedding_scale
        self._rope_of_layers = [distinct.index(rope) for rope in ropes]
        self.overlap_tokens = build.overlap_tokens if all(map(overlap.can_overlap, layers)) else 0
        self._tp = build.tp

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Normalised hidden states [T, D]; `positions_T` are those of RoPE, or [3, T] by axis."""
        by_rope = [rotary(positions_T) for rotary in self.rotary]
        rotations = [by_rope[number] for number in self._rope_of_layers]
        x_TD = self.embed_tokens(ids_T)
        if self._embedding_scale != 1.0:
            x_TD = x_TD * self._embedding_scale
        images = ctx.images
        if images is not None:
            x_TD = x_TD.index_copy(0, images.tokens_M, images.features_MLD[:, 0])
        residual_TD = None
        if (
            images is None
            and 0 < self.overlap_tokens <= len(x_TD)
            and (parts := self._tp.begin_step_in_parts(x_TD)) > 1
        ):
            layers = cast(list[DecoderLayer], list(self.layers))
            return overlap.forward_in_parts(layers, self.norm, x_TD.tensor_split(parts), rotations, ctx)
        aux = self.aux
        x_norm = None
        for number, (layer, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            keep_TD = None if aux is None else aux.part(number, len(x_TD))
            x_TD, residual_TD = layer(x_TD, residual_TD, rotation, ctx, keep_TD, x_norm)
            x_norm = cast(DecoderLayer, layer).last_norm
            if images is not None and 1 + number < images.features_MLD.shape[1]:
                # To the residual, which every rank has whole: the layer's output is a partial sum.
                residual_TD.index_add_(0, images.tokens_M, images.features_MLD[:, 1 + number])
        normed_TD, _ = add_norms(x_norm, self.norm, x_TD, residual_TD)
        return normed_TD


def self_attention(args: DecoderArgs, build: BuildContext) -> TokenMixers:
    """`SelfAttention` in every layer."""
    groups = kv_groups(args, build)
    return TokenMixers(
        [*groups], lambda layer, at: SelfAttention(args, layer, groups, at.at(SelfAttention.name_on_disk))
    )


class DecoderLM(CausalLM):
    """A decoder and its LM head: base of most classes in model files."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(
        self,
        config: Mapping[str, Any],
        args: DecoderArgs,
        build: BuildContext,
        mlp: Callable[[int, BuildContext], FeedForward] | None = None,
        token_mixers: TokenMixers | None = None,
    ):
        """`mlp` makes the feed-forward block of a layer in its own context, by default a `GatedMLP`."""
        super().__init__(config, build)
        token_mixers = token_mixers or self_attention(args, build)
        self.kv_groups = token_mixers.groups
        mlp = mlp or (lambda layer, at: GatedMLP(args, at))
        layers = []
        for layer in range(args.num_hidden_layers):
            at = build.at(f"model.layers.{layer}")
            layers.append(DecoderLayer(args, token_mixers.make(layer, at), mlp(layer, at.at("mlp")), build))
        self.model = DecoderModel(args, layers, build)
        tied = args.tie_word_embeddings
        self.overlap_tokens = self.model.overlap_tokens
        self.lm_head = LMHead(
            args.vocab_size,
            args.hidden_size,
            build.at("lm_head"),
            self.model.embed_tokens if tied else None,
            args.logits_soft_cap,
        )
        self.unused_on_disk = (*_ROPE_TABLES, *(("lm_head.weight",) if tied else ()), *OTHER_MODALITIES)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.model(ids_T, positions_T, ctx)

    @property
    def tower(self) -> VisionTower | None:
        return self.model.visual

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_RD)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self.lm_head.sample(hidden_RD, settings, positions_R)
