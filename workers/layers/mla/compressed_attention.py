"""Attention to the rows of the last tokens and to compressed entries of the whole context (DeepSeek-V4).

    x ─ wkv ─ norm ─ RoPE ────────────► a row for each token, key and value of all heads    window of tokens
    x ─ compressor ─► state of a token ► an entry for every M tokens, as such a row         whole context
    x ─ indexer's compressor ─────────► an index key for every M tokens ─┐
    x ─ wq_a ─ norm ─┬─ indexer.wq_b ─ RoPE ─────────────────────────────┴► top-k entries
                     └─ wq_b ─ norm of each head ─ RoPE ──► queries

A layer of kind "sparse" has an indexer and entries of overlapping windows; a "dense" one reads all of its
entries, which stand for more tokens; one without compression has only the window. Rows, states and entries
are plain rows in the KV groups of the engine: `compressed_caches`.

T tokens, D hidden, H heads (this rank's), E features of a head, Q of the query latent, G heads of the
indexer, I features of an index key, M tokens of an entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from atom_ops import (
    CachedRows,
    IndexKeys,
    Quantized,
    TopKIndices,
    compress_rows,
    compressed_attention,
    expand_values,
    index_topk,
    normed_queries,
    rms_norm,
    rotary,
    write_normed_rows,
    write_rows,
)
from workers.layers.attention.cache_groups import RowGroup, RowShape
from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext, GroupContext
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear, tp_range
from workers.layers.mla.sparse_mla import HeadWeights
from workers.layers.quantization.config import QuantizationConfig
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import CheckpointTensor, ShardRange, ShardSpec, WeightedLayer

COMPRESSED_MODULES = {"wqkv_a": ("wq_a", "wkv"), "wkv_gate": ("wkv", "wgate")}
"""Fused modules of `CompressedAttention`, for `packed_modules_mapping`."""

Kind = Literal["sparse", "dense"]


@dataclass(frozen=True, slots=True)
class Compression:
    """How a layer compresses its context."""

    kind: Kind
    rate: int
    """Tokens of an entry, M."""

    @property
    def windows(self) -> int:
        """Windows of M tokens that an entry is made of."""
        return 2 if self.kind == "sparse" else 1


@dataclass(frozen=True, kw_only=True)
class CompressedArgs:
    """The parameters of the attention of all layers."""

    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    window: int
    """Tokens whose rows a token reads, itself included."""
    o_groups: int
    """Groups of heads with an output projection each."""
    o_lora_rank: int
    """Features of a group after it."""
    index_heads: int
    index_width: int
    index_topk: int
    eps: float
    compressions: Sequence[Compression | None]
    """By layer; None: only the window."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One cache: its number, its group, and what its rows stand for."""

    number: int
    group: int
    rate: int
    window: int


@dataclass(frozen=True, slots=True)
class _Compressed:
    """The caches of a compressor."""

    states: _Place
    entries: _Place


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The caches of one layer."""

    recent: _Place
    compressor: _Compressed | None
    indexer: _Compressed | None


class _Numbering:
    """Numbers caches and puts those that are read over the same window into one group."""

    def __init__(self) -> None:
        self._groups: dict[int, list[tuple[int, RowShape]]] = {}
        self._count = 0

    def add(self, width: int, window: int, rate: int = 1) -> _Place:
        members = self._groups.setdefault(window, [])
        members.append((self._count, RowShape(width, rate)))
        self._count += 1
        return _Place(self._count - 1, list(self._groups).index(window), rate, window)

    def compressed(self, width: int, by: Compression) -> _Compressed:
        states = self.add(2 * by.windows * width, by.windows * by.rate)
        return _Compressed(states, self.add(width, 0, by.rate))

    def groups(self) -> list[RowGroup]:
        return [
            RowGroup([number for number, _ in members], [shape for _, shape in members], window)
            for window, members in self._groups.items()
        ]


def compressed_caches(args: CompressedArgs) -> tuple[list[RowGroup], list[LayerCaches]]:
    """The KV groups of a model, and the caches of each layer."""
    numbering = _Numbering()
    layers = []
    for by in args.compressions:
        recent = numbering.add(args.head_dim, args.window)
        compressor = numbering.compressed(args.head_dim, by) if by else None
        indexer = numbering.compressed(args.index_width, by) if by and by.kind == "sparse" else None
        layers.append(LayerCaches(recent, compressor, indexer))
    return numbering.groups(), layers


class RowNorm(WeightedLayer):
    """The weight of a norm that an op applies."""

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, build: BuildContext, other_names: tuple[str, ...] = ()):
        super().__init__()
        self.eps = eps
        tensor = CheckpointTensor("weight", ((size,),), other_names=other_names)
        self.add_weight("weight", [ShardSpec((size,), 0, ShardRange.whole(size), tensor)], build)


class Compressor(WeightedLayer):
    """Writes the states of a step's tokens and the entries that end with them; the same on every rank."""

    ape: torch.Tensor

    def __init__(
        self, width: int, by: Compression, args: CompressedArgs, rotary: RotaryEmbedding, build: BuildContext
    ):
        super().__init__()
        features = by.windows * width
        both = [ShardRange.whole(features)] * 2
        plain = replace(build, quantization=QuantizationConfig())  # whatever the others are
        self.wkv_gate = ColumnParallelLinear(args.hidden_size, both, False, plain.at("wkv_gate"))
        self.norm = RowNorm(width, args.eps, build)
        bias = ShardSpec((by.rate, features), 0, ShardRange.whole(by.rate))
        self.add_weight("ape", [bias], build, torch.float32)
        self._table = rotary.table

    def states(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Values and gates of the tokens, [T, 2 F]."""
        found: torch.Tensor = self.wkv_gate(x_TD)
        return found

    def write(
        self, states_TF: torch.Tensor, states: CachedRows, entries: CachedRows, slots_T: torch.Tensor
    ) -> None:
        write_rows(states_TF, states.rows, slots_T)
        compress_rows(states, self.ape, self.norm.weight, self.norm.eps, self._table(), entries)


class EntryIndexer(nn.Module):
    """Selects the entries that each token reads; the same on every rank."""

    def __init__(self, by: Compression, args: CompressedArgs, rotary: RotaryEmbedding, build: BuildContext):
        super().__init__()
        if build.block_size % by.rate:
            raise ValueError(
                f"--block-size {build.block_size} does not fit compressed sparse attention: it must be a "
                f"multiple of {by.rate}"
            )
        self._args = args
        # Scales the query-key product and the head weights at once.
        self._scale = args.index_width**-0.5 * args.index_heads**-0.5
        queries = ShardRange.whole(args.index_heads * args.index_width)
        self.compressor = Compressor(args.index_width, by, args, rotary, build.at("compressor"))
        self.wq_b = ColumnParallelLinear(args.q_lora_rank, [queries], False, build.at("wq_b"))
        self.weights_proj = HeadWeights(args.hidden_size, args.index_heads, build)

    def head_weights(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The weight of each head, float32 [T, G]."""
        weights_TG: torch.Tensor = self.weights_proj(x_TD)
        return weights_TG * self._scale

    def select(
        self, q_TO: torch.Tensor, weights_TG: torch.Tensor, rotation: Rotation, entries: CachedRows
    ) -> TopKIndices | None:
        """The entries that each token reads; None: all."""
        plan = entries.plan
        # With batch invariance all lengths must use the same computation: top-k selection.
        if plan.max_context_len // entries.rate <= self._args.index_topk and not plan.split_tokens:
            return None
        q_TGI = q_TO.unflatten(1, (self._args.index_heads, -1))
        rest = self._args.index_width - self._args.rope_dim
        rotated = rotary(q_TGI[..., rest:], rotation.cos_T1R, rotation.sin_T1R, True)
        q_TGI = torch.cat((q_TGI[..., :rest], rotated), -1)
        return index_topk(
            q_TGI, weights_TG, IndexKeys(entries.rows), plan, self._args.index_topk, entries.rate
        )


class GroupedOutput(WeightedLayer):
    """wo_a: maps the heads of each group to `o_lora_rank` features. A quantized one is dequantized."""

    weight: torch.Tensor

    def __init__(self, args: CompressedArgs, groups: ShardRange, build: BuildContext):
        super().__init__()
        self._groups = groups.size
        rows = groups.scaled(args.o_lora_rank)
        scheme = build.quantization.linear(build.prefix)
        self.dequantizes = scheme is not PLAIN
        width = args.num_heads // args.o_groups * args.head_dim
        self.add_matrix("weight", scheme, [ShardSpec((rows.total, width), 0, rows)], build)

    def process_weights_after_loading(self) -> None:
        if isinstance(weight := self.loaded("weight"), Quantized):
            self.set_weight("weight", self.dequantized(weight))

    def forward(self, out_THE: torch.Tensor) -> torch.Tensor:
        """[T, groups * o_lora_rank]."""
        of_groups = out_THE.flatten(1).unflatten(1, (self._groups, -1))
        return expand_values(of_groups, self.weight.unflatten(0, (self._groups, -1))).flatten(1)


class CompressedAttention(WeightedLayer):
    """Heads are sharded by groups of the output projection; everything that is cached is on every rank."""

    name_on_disk = "attn"

    attn_sink: torch.Tensor

    def __init__(
        self,
        args: CompressedArgs,
        layer: int,
        caches: LayerCaches,
        rotary: RotaryEmbedding,
        build: BuildContext,
    ):
        """`rotary` is the layer's. Raises ValueError where the heads cannot be sharded."""
        super().__init__()
        self._args = args
        self._caches = caches
        self._block_size = build.block_size
        groups = _local_groups(args, build)
        heads = groups.scaled(args.num_heads // args.o_groups)
        latents = [ShardRange.whole(args.q_lora_rank), ShardRange.whole(args.head_dim)]
        queries = heads.scaled(args.head_dim)
        self.wqkv_a = ColumnParallelLinear(args.hidden_size, latents, False, build.at("wqkv_a"))
        self.q_norm = RowNorm(args.q_lora_rank, args.eps, build)
        # transformers saves it under the name of the compressor's norm.
        self.kv_norm = RowNorm(args.head_dim, args.eps, build, (".norm.weight",))
        self.wq_b = ColumnParallelLinear(args.q_lora_rank, [queries], False, build.at("wq_b"))
        self.wo_a = GroupedOutput(args, groups, build.at("wo_a"))
        self.wo_b = RowParallelLinear(
            groups.scaled(args.o_lora_rank), args.hidden_size, False, build.at("wo_b")
        )
        self.add_weight("attn_sink", [ShardSpec((heads.total,), 0, heads)], build, torch.float32)
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        by = args.compressions[layer]
        if by is not None:
            self.compressor = Compressor(args.head_dim, by, args, rotary, build.at("compressor"))
            if by.kind == "sparse":
                self.indexer = EntryIndexer(by, args, rotary, build.at("indexer"))

    def forward(self, x_TD: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """This rank's partial sum of the output."""
        q_TQ, kv_TE = self.wqkv_a(x_TD).split([self._args.q_lora_rank, self._args.head_dim], 1)
        q_TQ = rms_norm(q_TQ.contiguous(), self.q_norm.weight, self.q_norm.eps)
        tensors = [self.wq_b(q_TQ), kv_TE]
        if self.compressor is not None:
            tensors.append(self.compressor.states(x_TD))
        if self.indexer is not None:
            tensors += [self.indexer.compressor.states(x_TD), self.indexer.wq_b(q_TQ)]
            tensors.append(self.indexer.head_weights(x_TD))
        out_THE = ctx.mix(self._mix, rotation, *tensors)
        return self.wo_b(self.wo_a(out_THE))

    def _mix(
        self,
        ctx: ForwardContext,
        rotation: Rotation,
        q_TO: torch.Tensor,
        kv_TE: torch.Tensor,
        *of_entries: torch.Tensor,
    ) -> torch.Tensor:
        """Attention output [T, H, E]; writes the step's rows."""
        recent, slots_T = self._cached(ctx, self._caches.recent)
        cos_sin = rotation.cos_T1R, rotation.sin_T1R
        write_normed_rows(kv_TE, self.kv_norm.weight, self.kv_norm.eps, *cos_sin, recent.rows, slots_T)
        q_THE = normed_queries(q_TO.unflatten(1, (-1, self._args.head_dim)), self._args.eps, *cos_sin)
        entries, topk = self._entries(ctx, rotation, of_entries)
        return compressed_attention(q_THE, recent, entries, topk, self.attn_sink, *cos_sin)

    def _entries(
        self, ctx: ForwardContext, rotation: Rotation, tensors: Sequence[torch.Tensor]
    ) -> tuple[CachedRows | None, TopKIndices | None]:
        """The layer's entries, with those of the step, and which of them each token reads."""
        if self.compressor is None or self._caches.compressor is None:
            return None, None
        entries = self._compress(ctx, self.compressor, self._caches.compressor, tensors[0])
        if self.indexer is None or self._caches.indexer is None:
            return entries, None
        _, states_TF, q_TO, weights_TG = tensors
        keys = self._compress(ctx, self.indexer.compressor, self._caches.indexer, states_TF)
        return entries, self.indexer.select(q_TO, weights_TG, rotation, keys)

    def _compress(
        self, ctx: ForwardContext, compressor: Compressor, caches: _Compressed, states_TF: torch.Tensor
    ) -> CachedRows:
        states, slots_T = self._cached(ctx, caches.states)
        entries, _ = self._cached(ctx, caches.entries)
        compressor.write(states_TF, states, entries, slots_T)
        return entries

    def _cached(self, ctx: ForwardContext, place: _Place) -> tuple[CachedRows, torch.Tensor]:
        """One of the layer's caches, and the slots of the step's tokens in its group."""
        rows = ctx.kv_layers[place.number]
        group = ctx.groups[place.group]
        assert isinstance(rows, torch.Tensor) and isinstance(group, GroupContext)
        cached = CachedRows(rows, group.plan, self._block_size, place.rate, place.window)
        return cached, group.slots_T


def _local_groups(args: CompressedArgs, build: BuildContext) -> ShardRange:
    """This rank's groups of heads."""
    if args.num_heads % args.o_groups:
        raise ValueError(f"{args.num_heads} attention heads do not form o_groups {args.o_groups} of one size")
    if build.tp.size > args.o_groups:
        raise ValueError(
            f"--tensor-parallel-size {build.tp.size} does not fit o_groups {args.o_groups}: it must be at "
            f"most {args.o_groups}"
        )
    return tp_range(args.o_groups, build)
