"""The decoder that most families share: attention with RoPE, then a gated MLP or experts.

    x ──┬─ norm ─ self_attn ─ (norm) ─┬─ norm ─ mlp ─ (norm) ─┬── …
        └───────────── + ─────────────┴────────── + ──────────┘

Most families have only the norms before the blocks; `LayerNorms` says which ones a family has.

A family passes its arguments, and its own `mlp` or `token_mixers` where it differs. A token mixer is
the layer's attention or linear attention. Modules are named as in checkpoints.

docs/develop/qwen3_in_plain_torch.py is the same model in 60 lines. Its lines are computed here by:

    embedding                                   `VocabEmbedding`
    rotation                                    `RotaryEmbedding`, once for all layers with the same RoPE
    x + mlp, input norm, q, k and v             `SelfAttention.after_norm`, `qkv_proj.after_norm`
    head norms, rotary, attention               `SelfAttention.attend`, an `AttentionBackend`
    o_proj                                      `RowParallelLinear`
    x + self_attention, norm, gate and up       `GatedMLP.after_norm`, `gate_up_proj.after_norm`
    silu(gate) * up, down_proj                  `RowParallelLinear.after_gate`
    last x + mlp, model.norm                    `RMSNorm.add_norm` in `DecoderModel.forward`
    lm_head                                     `LMHead`, for the sampling rows only

Each block receives the norm before it (`after_norm`), because most fuse the sum, the norm and their first
matmul. Its output is a partial sum over the tensor-parallel ranks; the next norm all-reduces it, adds it to
the residual and normalises in one call, as a norm after the block does with the one before the next.

T tokens, R sampling rows, D hidden, O features of the fused projection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from atom_ops import HeadNorms, SamplingBatch
from parallel.sharding import head_shard
from workers.layers.activation import gated_linear
from workers.layers.attention.attention import Attention, KVGroup, group_by_window
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.attention.rotary import NoRope, Rope, RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.attention.window import Windows
from workers.layers.causal_lm import OTHER_MODALITIES, CausalLM
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.linear import ColumnParallelLinear, ReorderedLinear, RowParallelLinear, mlp_range
from workers.layers.norm import NormAcrossRanks, RMSNorm, add_norms, norm_queries_and_keys
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer, consecutive
from workers.vision.tower import VisionTower

_DEFAULT_ROPE_THETA = 10000.0
# Old checkpoints store what is computed from config.json.
_ROPE_TABLES = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """Names of a layer's norms in the checkpoint; None: a layer has no such norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """The parameters of a decoder. The fields without a default come from `common_fields`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before RoPE."""
    norm_across_heads: bool = False
    """Whether the queries of all heads are normalised together before RoPE, and their keys."""
    qk_interleaved_on_disk: bool = False
    """Whether RoPE's pairs are neighbouring rows of the checkpoint's queries and keys (GPT-J): loading moves
    the first ones of a head before the others (NeoX)."""
    qkv_fused_on_disk: bool = False
    """Whether the checkpoint has one matrix for queries, keys and values."""
    mlp_fused_on_disk: bool = False
    """Whether it has one matrix for gate and up."""
    windows: Windows = ()
    """Sliding window of each layer; empty: full attention in every layer."""
    chunked: bool = False
    """Whether windows do not slide: queries see the tokens from the last multiple of the window on."""
    ropes: tuple[Rope | NoRope | None, ...] = ()
    """RoPE parameters of each layer, or none; empty: `rope_parameters` in every layer."""
    rope_interleaved: bool = False
    """RoPE style: pairs of neighbouring features (GPT-J), or of both halves (NeoX)."""
    zero_centred_norms: bool = False
    """Whether the checkpoint stores RMSNorm weights minus one."""
    norms: LayerNorms = PRE_NORMS
    attention_scale: float | None = None
    """Softmax scale; None: 1 / sqrt(head_dim)."""
    sees_ahead: bool = False
    """Whether tokens of images see some after their own: see `AttentionPlan.ahead_T`."""
    attention_soft_cap: float = 0.0
    """Attention scores s become cap * tanh(s / cap); 0: they stay as they are."""
    logits_soft_cap: float = 0.0
    """The same for the logits."""
    embedding_scale: float = 1.0
    """Factor of the embeddings, but not of a tied LM head."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    sinks: bool = False
    """Whether each query head has a learned attention-sink logit."""
    attention_inputs: int = 0
    """Features that attention reads; 0: `hidden_size`."""
    mtp_layers: int = 0
    """Layers for multi-token prediction that are built; they cache as the others do, with full attention."""

    @property
    def cached_layers(self) -> int:
        """Layers with a cache."""
        return self.num_hidden_layers + self.mtp_layers


def common_fields(config: Mapping[str, Any], partial_rotary: bool = False) -> dict[str, Any]:
    """The fields of `DecoderArgs` that have the same name in every family's config.json.

    rope_parameters take precedence over rope_theta and partial_rotary_factor at the top level.
    `partial_rotary`: whether the family supports RoPE on a part of each head. Raises KeyError for a
    missing field, ValueError for an unsupported value.
    """
    heads = config["num_attention_heads"]
    top_level = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    rope = {"rope_theta": _DEFAULT_ROPE_THETA, **top_level, **config["rope_parameters"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not partial_rotary:
        raise ValueError(f"{config['model_type']} with a partial_rotary_factor other than 1 is not supported")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_parameters": rope,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def kv_groups(args: DecoderArgs, build: BuildContext) -> list[KVGroup]:
    """One group for each distinct window, or for each layer with `separate_tables`."""
    shard = head_shard(args.num_attention_heads, args.num_key_value_heads, build.tp.size, build.tp.rank)
    windows = (*(args.windows or (None,) * args.num_hidden_layers), *(None,) * args.mtp_layers)
    groups = group_by_window(windows, shard.kv_count, args.head_dim, build.separate_tables, args.chunked)
    return [_bound(group, shard.q_count, args, build) for group in groups]


def kv_group(args: DecoderArgs, layers: Sequence[int], build: BuildContext) -> KVGroup:
    """The group of `layers` with full attention."""
    shard = head_shard(args.num_attention_heads, args.num_key_value_heads, build.tp.size, build.tp.rank)
    group = KVGroup(layers, shard.kv_count, args.head_dim)
    return _bound(group, shard.q_count, args, build)


def _bound(group: KVGroup, heads: int, args: DecoderArgs, build: BuildContext) -> KVGroup:
    return group.bound(heads, args.sinks, build, args.attention_soft_cap > 0, args.sees_ahead)


class SelfAttention(WeightedLayer):
    """Grouped-query attention with RoPE."""

    name_on_disk = "self_attn"

    sinks: torch.Tensor | None

    def __init__(self, args: DecoderArgs, layer: int, groups: Sequence[KVGroup], build: BuildContext):
        super().__init__()
        heads = args.num_attention_heads
        kv_heads = args.num_key_value_heads
        head_dim = args.head_dim
        shard = head_shard(heads, kv_heads, build.tp.size, build.tp.rank)
        q = ShardRange(heads * head_dim, shard.q_start * head_dim, shard.q_count * head_dim)
        kv = ShardRange(kv_heads * head_dim, shard.kv_start * head_dim, shard.kv_count * head_dim)
        qkv = consecutive([q, kv, kv]) if args.qkv_fused_on_disk else [q, kv, kv]
        inputs = args.attention_inputs or args.hidden_size
        at = build.at("qkv_proj")
        if args.qk_interleaved_on_disk:
            order = _halves_first(q.size + kv.size, kv.size, head_dim)
            self.qkv_proj: ColumnParallelLinear = ReorderedLinear(inputs, qkv, args.qkv_bias, at, order)
        else:
            self.qkv_proj = ColumnParallelLinear(inputs, qkv, args.qkv_bias, at)
        self.o_proj = RowParallelLinear(q, args.hidden_size, args.o_bias, build.at("o_proj"))
        self.q_norm: RMSNorm | None = self._head_norm(args, build)
        self.k_norm: RMSNorm | None = self._head_norm(args, build)
        if args.norm_across_heads:
            self.q_norm = NormAcrossRanks(q, args.rms_norm_eps, build)
            self.k_norm = NormAcrossRanks(kv, args.rms_norm_eps, build)
            self._repeated = _repeated_heads(heads, kv_heads, build) * head_dim
        self.register_buffer("sinks", None)
        if args.sinks:
            self.add_weight(
                "sinks", [ShardSpec((heads,), 0, ShardRange(heads, shard.q_start, shard.q_count))], build
            )
        self._q_features = q.size
        self.attention = Attention(layer, groups, args.attention_scale, args.attention_soft_cap)

    @staticmethod
    def _head_norm(args: DecoderArgs, build: BuildContext) -> RMSNorm | None:
        if not args.qk_norm:
            return None
        return RMSNorm(args.head_dim, args.rms_norm_eps, build, args.zero_centred_norms)

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv_TO, residual_TD = self.qkv_proj.after_norm(norm, x_TD, residual_TD)
        return self.o_proj(self.attend(qkv_TO, rotation, ctx)), residual_TD

    def forward(self, x_TD: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """This rank's partial sum of the output."""
        out_TD: torch.Tensor = self.o_proj(self.attend(self.qkv_proj(x_TD), rotation, ctx))
        return out_TD

    def attend(self, qkv_TO: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """The input of `o_proj`."""
        if isinstance(self.q_norm, NormAcrossRanks) and isinstance(self.k_norm, NormAcrossRanks):
            qkv_TO = norm_queries_and_keys(qkv_TO, self.q_norm, self.k_norm, self._repeated)
        if rotation.query_scale_T1 is not None:
            # In float32, and rounded once; nothing else reads the projection.
            qkv_TO[:, : self._q_features].mul_(rotation.query_scale_T1)
        return self.attention(qkv_TO, rotation, ctx, self._head_norms(), self.sinks)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None or isinstance(self.q_norm, NormAcrossRanks):
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


def _halves_first(rotated: int, others: int, head_dim: int) -> torch.Tensor:
    """The rows of `rotated` features, of each head the even ones, then the odd ones; then `others`."""
    pairs = torch.arange(rotated).view(-1, head_dim // 2, 2)
    return torch.cat((pairs.transpose(1, 2).flatten(), torch.arange(rotated, rotated + others)))


def _repeated_heads(heads: int, kv_heads: int, build: BuildContext) -> int:
    """Number of this rank's key heads that the rank before it has too."""
    if build.tp.rank == 0:
        return 0
    shard = head_shard(heads, kv_heads, build.tp.size, build.tp.rank)
    before = head_shard(heads, kv_heads, build.tp.size, build.tp.rank - 1)
    return before.kv_start + before.kv_count - shard.kv_start


class TokenMixer(Protocol):
    """A decoder layer's attention, or its replacement such as linear attention."""

    name_on_disk: str
    """Its name within the layer."""

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output for norm(x + residual), x + residual); see `RMSNorm.add_norm` for `x_TD`.

        The output is a partial sum over the tensor-parallel ranks.
        """


@dataclass(frozen=True)
class TokenMixers:
    """The token mixers of a family that does not use `SelfAttention` in every layer."""

    groups: list[CacheGroup]
    """Cache groups of all layers."""
    make: Callable[[int, BuildContext], TokenMixer]
    """Makes the token mixer of a layer; the context is that of the whole layer."""


class FeedForward(Protocol):
    """A decoder layer's MLP or mixture of experts."""

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output for norm(x + residual), x + residual), as `TokenMixer.after_norm` returns it."""

    def __call__(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the output."""


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, args: DecoderArgs, build: BuildContext):
        super().__init__()
        hidden = args.hidden_size
        bias = args.mlp_bias
        features = mlp_range(args.intermediate_size, build)
        both = consecutive([features] * 2) if args.mlp_fused_on_disk else [features] * 2
        self.gate_up_proj = ColumnParallelLinear(hidden, both, bias, build.at("gate_up_proj"))
        self.down_proj = RowParallelLinear(features, hidden, bias, build.at("down_proj"))
        self._gated = gated_linear(args.hidden_act)

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up_T2F, residual_TD = self.gate_up_proj.after_norm(norm, x_TD, residual_TD)
        return self.down_proj.after_gate(self._gated, gate_up_T2F), residual_TD

    def forward(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the output."""
        return self.down_proj.after_gate(self._gated, self.gate_up_proj(normed_TD))


Part = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""(norm(x + residual), x + residual) of some of a step's tokens, for which the caller waits."""


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block, each added to the residual stream."""

    mlp: FeedForward

    def __init__(self, args: DecoderArgs, attention: TokenMixer, mlp: FeedForward, build: BuildContext):
        super().__init__()
        self._norms = args.norms
        setattr(self, attention.name_on_disk, attention)
        self._token_mixer = attention.name_on_disk
        self.mlp = mlp
        for name in filter(None, asdict(args.norms).values()):
            self.add_module(name, _norm(args, build))

    def _norm(self, name: str | None) -> RMSNorm | None:
        return None if name is None else cast(RMSNorm, getattr(self, name))

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm of its output, before the caller adds it to the residual."""
        return self._norm(self._norms.after_mlp)

    @property
    def first_norm(self) -> RMSNorm:
        """The norm before attention."""
        norm = self._norm(self._norms.before_attention)
        assert norm is not None, "layers that are computed in parts have it"
        return norm

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
        keep_TD: torch.Tensor | None = None,
        x_norm: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the MLP, residual), which the caller adds, after `last_norm` of the output.

        `x_norm` is `last_norm` of the layer that returned `x_TD`. `keep_TD` gets the sum of the inputs.
        """
        names = self._norms
        token_mixer = getattr(self, self._token_mixer)
        norm = self._norm(names.before_attention)
        out_TD, residual_TD = _after_norms(token_mixer, x_norm, norm, x_TD, residual_TD, rotation, ctx)
        if keep_TD is not None:
            keep_TD.copy_(residual_TD)  # later norms may add to the residual in place
        x_norm, norm = self._norm(names.after_attention), self._norm(names.before_mlp)
        return _after_norms(self.mlp, x_norm, norm, out_TD, residual_TD)

    @property
    def has_parts(self) -> bool:
        """Whether `in_parts` can compute it."""
        attention = getattr(self, self._token_mixer)
        if self._norms != PRE_NORMS or not isinstance(attention, SelfAttention):
            return False
        return isinstance(self.mlp, GatedMLP) and not isinstance(attention.q_norm, NormAcrossRanks)

    def in_parts(
        self, parts: Sequence[Part], next_norm: RMSNorm, rotation: Rotation, ctx: ForwardContext
    ) -> list[Part]:
        """Compute the layer for a step's tokens in parts: from after `input_layernorm` to after `next_norm`.

        Everything but attention computes each token alone, while the all-reduces of other parts run.
        """
        attention = getattr(self, self._token_mixer)
        mlp = self.mlp
        assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
        qkv = []
        residuals = []
        for end in parts:
            normed_TD, residual_TD = end()
            qkv.append(attention.qkv_proj(normed_TD))
            residuals.append(residual_TD)
        outs = attention.attend(torch.cat(qkv), rotation, ctx).split([len(part) for part in qkv])
        norm = self._norm(self._norms.before_mlp)
        assert norm is not None
        parts = [
            norm.begin_add_norm(attention.o_proj(out_TO), residual_TD)
            for out_TO, residual_TD in zip(outs, residuals, strict=True)
        ]
        done = []
        for end in parts:
            normed_TD, residual_TD = end()
            done.append(next_norm.begin_add_norm(mlp(normed_TD), residual_TD))
        return done


def _after_norms(
    block: Any,
    x_norm: RMSNorm | None,
    norm: RMSNorm | None,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of a token mixer or MLP for norm(total), total); see `add_norms`."""
    if x_norm is None and norm is not None:
        fused: tuple[torch.Tensor, torch.Tensor] = block.after_norm(norm, x_TD, residual_TD, *others)
        return fused
    normed_TD, total_TD = add_norms(x_norm, norm, x_TD, residual_TD)
    return block(normed_TD, *others), total_TD


def _norm(args: DecoderArgs, build: BuildContext, scale: float = 1.0) -> RMSNorm:
    return RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms, scale)


class AuxStates:
    """The inputs of some layers, kept for a model that drafts until the next pass overwrites them."""

    def __init__(self, layers: Sequence[int], most_tokens: int, hidden_size: int, build: BuildContext):
        self._places = {layer: place for place, layer in enumerate(layers)}
        width = len(layers) * hidden_size
        self.states_TF = torch.zeros(most_tokens, width, dtype=build.dtype, device=build.device)
        """Side by side, in the order of `layers`; [most_tokens, F]."""
        self._hidden_size = hidden_size

    def part(self, layer: int, tokens: int) -> torch.Tensor | None:
        """Where a layer's inputs are kept, [tokens, D]; None if they are not."""
        place = self._places.get(layer)
        if place is None:
            return None
        return self.states_TF[:tokens].narrow(1, place * self._hidden_size, self._hidden_size)


class DecoderModel(nn.Module):
    """Maps token ids to normalised hidden states."""

    aux: AuxStates | None = None
    """Set for a drafting model that reads the inputs of layers."""

    def __init__(self, args: DecoderArgs, layers: Sequence[DecoderLayer], build: BuildContext):
        super().__init__()
        self.embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size, build.at("model.embed_tokens"))
        self.layers = nn.ModuleList(layers)
        self.norm = _norm(args, build, args.logits_scale)
        self.visual: VisionTower | None = None
        ropes = args.ropes or (args.rope_parameters,) * args.num_hidden_layers
        distinct = [rope for layer, rope in enumerate(ropes) if rope not in ropes[:layer]]
        self.rotary = nn.ModuleList(
            RotaryEmbedding(args.head_dim, rope, build, args.rope_interleaved) for rope in distinct
        )
        self.hidden_size = args.hidden_size
        self._embedding_scale = args.embedding_scale
        self._rope_of_layers = [distinct.index(rope) for rope in ropes]
        self.overlap_tokens = build.overlap_tokens if all(layer.has_parts for layer in layers) else 0
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
            return self._in_parts(x_TD.tensor_split(parts), rotations, ctx)
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

    def _in_parts(
        self, embedded: Sequence[torch.Tensor], rotations: Sequence[Rotation], ctx: ForwardContext
    ) -> torch.Tensor:
        layers = cast(list[DecoderLayer], list(self.layers))
        first, *others = [*(layer.first_norm for layer in layers), self.norm]
        parts: list[Part] = [partial(first.add_norm, part_TD, None) for part_TD in embedded]
        for layer, next_norm, rotation in zip(layers, others, rotations, strict=True):
            parts = layer.in_parts(parts, next_norm, rotation, ctx)
        return torch.cat([end()[0] for end in parts])


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
