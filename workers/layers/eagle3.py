"""The EAGLE-3 head: one layer that predicts from a model's hidden states at several depths.

    hidden states of token i ─ fc ─┬─ hidden_norm ──────┐
                                   │                    ├─ layer ─┬─ norm ─ lm_head ─ d2t ► token i + 2
    embedding of token i + 1 ──────┼─ input_layernorm ──┘         │
                                   └─────────── + ────────────────┴► in place of fc's output for token i + 1

The layer is Llama's, or has multi-head latent attention. EAGLE 3.1 normalises the hidden states before fc:
each one (fc_norm), or all as one vector (norm_before_fc). The head may have a smaller vocabulary (d2t maps it
to the model's), and an embedding of its own.

T tokens, R rows, F features of the hidden states side by side, D hidden size of the head.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from atom_ops import SamplingBatch
from workers.checkpoint.draft_configs import LATENT_EAGLE3, eagle3_fields, eagle3_layers
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.attention.self_attention import SelfAttention, kv_groups
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.hidden_states_reader import HiddenStatesReader
from workers.layers.linear import ReplicatedLinear
from workers.layers.mla.latent_decoder import decoder_args, latent_args, latent_token_mixers
from workers.layers.mla.mla import LATENT_MODULES, LatentAttention
from workers.layers.norm import RMSNorm
from workers.layers.vocabulary_map import VocabularyMap

_LAYER = "midlayer"
_NUMBERED_LAYER = "layers.0"


class Eagle3Layer(nn.Module):
    """Attention reads embedding and hidden state side by side; the hidden state is the residual stream."""

    def __init__(
        self,
        args: DecoderArgs,
        attention: SelfAttention | LatentAttention,
        norm_before_residual: bool,
        build: BuildContext,
    ):
        """`norm_before_residual`: whether the residual stream is the normalised hidden state."""
        super().__init__()
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.hidden_norm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.mlp = GatedMLP(args, build.at("mlp"))
        self._norm_before_residual = norm_before_residual

    def forward(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the MLP, residual); the caller adds them."""
        normed_TD = self.hidden_norm(hidden_TD)
        both_T2D = torch.cat((self.input_layernorm(embedded_TD), normed_TD), -1)
        residual_TD = normed_TD if self._norm_before_residual else hidden_TD
        out_TD = self.self_attn(both_T2D, rotation, ctx)
        return self.mlp.after_norm(self.post_attention_layernorm, out_TD, residual_TD)


_Attention = tuple[DecoderArgs, list[CacheGroup], SelfAttention | LatentAttention]
"""The arguments of a layer, its cache groups, and its attention."""


def _grouped(config: Mapping[str, Any], build: BuildContext) -> _Attention:
    """Llama's attention, in the layer at `build`."""
    bias = config["attention_bias"]
    fields = common_fields(config)
    fields["attention_inputs"] = 2 * fields["hidden_size"]
    args = DecoderArgs(**fields, qkv_bias=bias, o_bias=bias, mlp_bias=config["mlp_bias"])
    groups = kv_groups(args, build)
    return args, [*groups], SelfAttention(args, 0, groups, build.at("self_attn"))


def _latent(config: Mapping[str, Any], build: BuildContext) -> _Attention:
    """Multi-head latent attention, in the layer at `build`."""
    args = decoder_args(config)
    latent = replace(latent_args(config), attention_inputs=2 * args.hidden_size)
    mixers = latent_token_mixers(latent, 1, build)
    attention = mixers.make(0, build)
    assert isinstance(attention, LatentAttention)
    return args, mixers.groups, attention


class Eagle3Head(HiddenStatesReader):
    """The head of a target model."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **LATENT_MODULES}

    def __init__(self, config: Mapping[str, Any], target: DecoderLM, names: Set[str], build: BuildContext):
        super().__init__(config, target, names, build)
        config = eagle3_fields(config)
        numbered = any(name.startswith(f"{_NUMBERED_LAYER}.") for name in names)
        renamed = {"vocabulary": "", **({_LAYER: _NUMBERED_LAYER} if numbered else {})}
        self.renamed_on_disk = renamed  # type: ignore[misc]  # it differs from head to head
        build = replace(build, renamed=renamed)
        target_hidden = target.model.hidden_size
        at = build.at(_LAYER)
        is_latent = config["architectures"][0] in LATENT_EAGLE3
        args, self.kv_groups, attention = (_latent if is_latent else _grouped)(config, at)
        hidden = args.hidden_size
        self.aux_layers = eagle3_layers(config, len(target.model.layers))
        states = len(self.aux_layers)
        norms = [RMSNorm(target_hidden, args.rms_norm_eps, build) for _ in range(states * config["fc_norm"])]
        self.fc_norm = nn.ModuleList(norms)
        self.input_norm: RMSNorm | None = None
        if config["norm_before_fc"]:
            self.input_norm = RMSNorm(states * target_hidden, args.rms_norm_eps, build)
        self.fc = ReplicatedLinear(states * target_hidden, hidden, build)
        self.midlayer = Eagle3Layer(args, attention, config["norm_before_residual"], at)
        self.norm = RMSNorm(hidden, args.rms_norm_eps, build)
        self.rotary = RotaryEmbedding(args.head_dim, args.rope_parameters, build, args.rope_interleaved)
        own = args.vocab_size
        draft_vocab = config.get("draft_vocab_size") or own
        self.lm_head = LMHead(draft_vocab, hidden, build.at("lm_head"), None)
        self.vocabulary = VocabularyMap(draft_vocab, build) if draft_vocab != own else None
        self.unused_on_disk = ("t2d", *(() if self.vocabulary else ("d2t",)), "*.rotary_emb.inv_freq")
        self._embed: list[VocabEmbedding] = [target.model.embed_tokens]  # not a module of this model
        self.embed_tokens: VocabEmbedding | None = None
        if "embed_tokens.weight" in names:
            self.embed_tokens = VocabEmbedding(own, hidden, build.at("embed_tokens"))
            self._embed = [self.embed_tokens]
        self._returns_normed = config["norm_output"]

    def combine(self, aux_TF: torch.Tensor) -> torch.Tensor:
        """The first hidden states [T, D], from the model's at `aux_layers`, side by side."""
        if self.fc_norm:
            parts = aux_TF.chunk(len(self.fc_norm), -1)
            aux_TF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            aux_TF = self.input_norm(aux_TF)
        return self.fc(aux_TF)

    def forward(
        self,
        next_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """Hidden states [T, D], for `sample` and for the tokens after the next ones.

        `hidden_TD` are results of `combine` or of this method, of the tokens at `positions_T`.
        """
        embedded_TD = self._embed[0](next_ids_T)
        x_TD, residual_TD = self.midlayer(embedded_TD, hidden_TD, self.rotary(positions_T), ctx)
        normed_TD, total_TD = self.norm.add_norm(x_TD, residual_TD)
        return normed_TD if self._returns_normed else total_TD

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Ids of the model's vocabulary, int64 [R], sampled from the head's."""
        normed_RD = hidden_RD if self._returns_normed else self.norm(hidden_RD)
        ids_R = self.lm_head.sample(normed_RD, settings, positions_R)
        return ids_R if self.vocabulary is None else self.vocabulary(ids_R)
