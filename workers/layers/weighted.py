"""Layers with weights: which checkpoint tensors fill them, and the shard that each rank keeps.

A layer does not read files. For each of its weights it declares the checkpoint tensors that are
stacked into it and the range that this rank keeps; `workers.weights` reads them.

    checkpoint:  q_proj.weight [9*E, D]   k_proj.weight [3*E, D]   v_proj.weight [3*E, D]
                       | rows 0..6*E            | rows 0..2*E            | rows 0..2*E
                       v                        v                        v
    rank 0:      qkv_proj.weight [(6+2+2)*E, D]

Most tensors are stored as they are used, under the name of their layer. For the others (one expert
of a stacked tensor, transposed) the shard names the tensor to read and how to decode it.

A matrix may be stored as several tensors, as its quantization scheme declares: codes and scales. Each
is sharded in its own units, a buffer of its own, and all together become one `Weight`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from atom_ops import Packed, Quantized, Weight, tensors_of
from workers.layers.context import BuildContext
from workers.layers.quantization.scheme import FLOATS, PLAIN, WHOLE, Fill, Packing, Scheme, StoredTensor


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The entries `start .. start + size` that a rank keeps of a dimension of size `total`."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "ShardRange":
        """The whole dimension: not sharded."""
        return cls(total, 0, total)

    def scaled(self, width: int) -> "ShardRange":
        """The same share of a dimension that has `width` entries for each of these."""
        return ShardRange(self.total * width, self.start * width, self.size * width)

    def cuts(self, unit: int) -> bool:
        """Whether an end of the range lies within a block of `unit` entries."""
        stop = self.start + self.size
        return self.start % unit != 0 or (stop % unit != 0 and stop != self.total)

    def in_units(self, unit: int) -> "ShardRange":
        """The same range of a tensor with one entry for each block; it must not cut one."""
        if unit == WHOLE:
            return ShardRange(1, 0, min(self.size, 1))
        stop = -(-(self.start + self.size) // unit)
        return ShardRange(-(-self.total // unit), self.start // unit, stop - self.start // unit)


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint, or one entry of its first dimension."""

    name: str
    """Relative to the layer's name."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the whole tensor: it has one of them."""
    entry: int | None = None
    """Index into the first dimension; None: the whole tensor."""
    other_names: tuple[str, ...] = ()
    """The checkpoint may use one of these instead."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)


@dataclass(frozen=True, slots=True)
class PackedShard:
    """Where the checkpoint has a shard that it packs in another way than memory."""

    index: tuple[slice, ...]
    """The part to read."""
    unpack: Callable[[Tensor], Tensor]
    """Maps that part to the shard in memory."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One matrix or vector of the checkpoint, and the range of it that this rank keeps along `dim`."""

    shape: tuple[int, ...]
    dim: int
    kept: ShardRange
    tensor: CheckpointTensor | None = None
    """The tensor it is decoded from; None: one of this shape, named as the layer's weight."""
    decode: Callable[[Tensor], Tensor] | None = None
    """Maps `tensor` to one of `shape`; None: it has that shape already."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """What the checkpoint may hold."""
    matrix: tuple[int, int] | None = None
    """Shape of the matrix that this is a part of; None: its own."""
    fill: Fill = PLAIN.tensors[0].fill
    packed: PackedShard | None = None
    """How the checkpoint has it; None: in the layout of memory, or as `decode` tells."""
    stored: StoredTensor | None = None
    """Which of the tensors that store `matrix` it is; None: it is no matrix."""

    @property
    def elsewhere(self) -> bool:
        """Whether other ranks keep all of it: it is known, and neither needed nor read."""
        return self.kept.size == 0

    def of(self, stored: StoredTensor) -> "ShardSpec":
        """The same shard of one of the tensors that store this matrix."""
        outputs, inputs = self.shape
        shape, decode = stored.shape((outputs, inputs)), stored.decode
        kept = self.kept.in_units(stored.unit[self.dim])
        if self.dim == 1 and stored.all_inputs:
            kept = ShardRange.whole(shape[1])
        return replace(
            self,
            shape=shape,
            kept=kept,
            decode=None if decode is None else lambda tensor: decode(tensor, (outputs, inputs)),
            dtypes=stored.dtypes,
            matrix=(outputs, inputs),
            fill=stored.fill,
            packed=None if stored.packing is None else self._packed(stored, stored.packing),
            stored=stored,
        )

    def _packed(self, stored: StoredTensor, packing: Packing) -> PackedShard:
        """The part of the tensor that stores this shard."""
        parts = [slice(None), slice(None)]
        if self.dim == 0 or not stored.all_inputs:
            kept = self.kept.in_units(packing.unit[self.dim])
            parts[self.dim] = slice(kept.start, kept.start + kept.size)
        if packing.vector:
            return PackedShard((parts[1],), lambda part: packing.unpack(part[None]))
        if packing.transposed:
            return PackedShard((parts[1], parts[0]), lambda part: packing.unpack(part.t()))
        return PackedShard((parts[0], parts[1]), packing.unpack)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.kept.size, *self.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """The kept range, as an index into the whole tensor."""
        return (*[slice(None)] * self.dim, slice(self.kept.start, self.kept.start + self.kept.size))


class WeightedLayer(nn.Module):
    """Base of every layer with weights. The shards `shards[name]` fill buffer `name`, stacked along rows."""

    shards: dict[str, tuple[ShardSpec, ...]]
    prefix: str | None
    """Path in the checkpoint, by which a quantization scheme was chosen; None where there is no choice."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = {}
        self.prefix = None
        self._schemes: dict[str, Scheme] = {}

    def add_weight(
        self, name: str, shards: Sequence[ShardSpec], build: BuildContext, dtype: torch.dtype | None = None
    ) -> None:
        """Register the uninitialised buffer `name`, large enough for its shards."""
        rows = sum(shard.kept_shape[0] for shard in shards)
        shape = (rows, *shards[0].kept_shape[1:])
        buffer = torch.empty(shape, dtype=dtype or build.dtype, device=build.device)
        self.register_buffer(name, buffer)
        self.shards[name] = tuple(shards)

    def add_matrix(self, name: str, scheme: Scheme, shards: Sequence[ShardSpec], build: BuildContext) -> None:
        """Register the buffers of the matrix `name`, stacked from `shards` [O, I] as `scheme` stores them.

        Raises ValueError where a shard would cut a block of the scheme.
        """
        check_blocks(scheme, shards, build)
        stored_shards = {stored: [shard.of(stored) for shard in shards] for stored in scheme.tensors}
        self.add_stacked(name, scheme, stored_shards, build)

    def add_stacked(
        self,
        name: str,
        scheme: Scheme,
        shards: Mapping[StoredTensor, Sequence[ShardSpec]],
        build: BuildContext,
    ) -> None:
        """Register the buffers of the matrix `name`, each with its own shards, which cut no block."""
        self.prefix = build.prefix
        self._schemes[name] = scheme
        for stored, parts in shards.items():
            self.add_weight(name + stored.suffix, parts, build, stored.dtype)

    def loaded(self, name: str, experts: int | None = None) -> Weight:
        """The weight [O, I] of the matrix `name` from its loaded buffers, or [X, O, I] of X `experts`."""
        scheme = self._schemes.get(name, PLAIN)
        buffers = [self.get_buffer(name + stored.suffix) for stored in scheme.tensors]
        if experts is not None:
            buffers = [buffer.unflatten(0, (experts, -1)) for buffer in buffers]
        return scheme.weight(*buffers)

    def set_weight(self, name: str, weight: Weight) -> None:
        """Replace the buffers of the matrix `name` by attribute `name`; a plain weight stays a buffer."""
        for stored in self._schemes.get(name, PLAIN).tensors:
            delattr(self, name + stored.suffix)
        if isinstance(weight, Tensor):
            self.register_buffer(name, weight)
        else:
            setattr(self, name, weight)

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """The scheme of each matrix that was added with one."""
        return self._schemes

    @property
    def unused_on_disk(self) -> set[str]:
        """Tensors of a module in the checkpoint that its scheme does not need."""
        return {name for scheme in self._schemes.values() for name in scheme.unused}

    def held_weights(self) -> Iterator[Weight]:
        """All weights of this layer that are in memory; those that are not matrices are plain ones."""
        yield from self.buffers(recurse=False)
        for value in vars(self).values():
            if isinstance(value, Packed | Quantized):
                yield value

    def held_tensors(self) -> Iterator[Tensor]:
        """The tensors of `held_weights`."""
        for weight in self.held_weights():
            yield from tensors_of(weight)

    def process_weights_after_loading(self) -> None:
        """Convert the weights to the layout that `forward` needs.

        Called once, as soon as all weights of this layer are loaded; those of other layers may not be.
        """


def check_blocks(scheme: Scheme, shards: Sequence[ShardSpec], build: BuildContext) -> None:
    """Raise ValueError where a shard of a matrix, or the next one stacked below it, would cut a block."""
    for number, shard in enumerate(shards):
        for what, size, unit in zip(_DIMS, shard.shape, scheme.unit, strict=True):
            if size % unit and not scheme.ragged:
                raise ValueError(f"{build.prefix}: {size} {what}, not a multiple of {unit} ({scheme.name})")
        what, unit, kept = _DIMS[shard.dim], scheme.unit[shard.dim], shard.kept
        if kept.cuts(unit):
            raise ValueError(
                f"{build.prefix}: with --tensor-parallel-size {build.tp.size} this rank would keep "
                f"{what} {kept.start} to {kept.start + kept.size} of {kept.total}, which cuts a block of "
                f"{unit} ({scheme.name}): use a size for which each rank keeps a multiple of {unit}"
            )
        if number + 1 < len(shards) and shard.kept_shape[0] % scheme.unit[0]:
            raise ValueError(
                f"{build.prefix}: its part {number} has {shard.kept_shape[0]} outputs, not a multiple of "
                f"{scheme.unit[0]} ({scheme.name}), so the next part cannot be fused with it: use a plain "
                "checkpoint"
            )


_DIMS = ("outputs", "inputs")
