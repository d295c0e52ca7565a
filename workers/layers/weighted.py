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
from itertools import accumulate

import torch
from torch import Tensor, nn

from atom_ops import Packed, Quantized, Weight, tensors_of
from workers.layers.context import BuildContext
from workers.layers.quantization.scheme import PLAIN, WHOLE, Packing, Scheme, StoredTensor

_QUANTIZED_AT_ONCE = 1 << 20
"""Numbers of a plain matrix that are quantized at once."""


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


def consecutive(ranges: Sequence[ShardRange]) -> list[ShardRange]:
    """The same entries within one tensor that has all of these dimensions one after the other."""
    total = sum(each.total for each in ranges)
    starts = accumulate((each.total for each in ranges), initial=0)
    return [
        ShardRange(total, start + each.start, each.size) for start, each in zip(starts, ranges, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Read the kept range: the checkpoint has the layout of memory."""


@dataclass(frozen=True, slots=True)
class ReadPacked:
    """Read a part of a tensor that the checkpoint packs in another way than memory."""

    index: tuple[slice, ...]
    """The part to read."""
    unpack: Callable[[Tensor], Tensor]
    """Maps that part to the shard in memory."""


@dataclass(frozen=True, slots=True)
class ReadDecoded:
    """Read the whole tensor, decode it, and keep the range of the result."""

    decode: Callable[[Tensor], Tensor]
    """Maps the tensor to one of the shard's `shape`."""


Reading = ReadRange | ReadPacked | ReadDecoded


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint, or one entry of its first dimension."""

    name: str
    """Name, relative to that of the layer, or after a dot to that of the module around it."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that the whole tensor may have."""
    entry: int | None = None
    """Index into the first dimension; None: the whole tensor."""
    other_names: tuple[str, ...] = ()
    """The checkpoint may use one of these instead."""
    first_row: int = 0
    """The row of the tensor, or of its entry, where the shard's matrix begins."""
    stacked: "CheckpointTensor | None" = None
    """The checkpoint may instead have the matrix as a part of this tensor."""
    reading: Reading | None = None
    """How a shard is read from it; None: as the shard says."""

    @property
    def names(self) -> tuple[str, ...]:
        stacked = () if self.stacked is None else self.stacked.names
        return (self.name, *self.other_names, *stacked)

    def named(self, name: str) -> "CheckpointTensor":
        """The tensor that the checkpoint has under this one of the `names`."""
        return self.stacked if self.stacked is not None and name in self.stacked.names else self

    def within(self, path: str) -> "CheckpointTensor":
        """The same tensor, with names relative to that of the layer at `path` made whole."""
        stacked = None if self.stacked is None else self.stacked.within(path)
        name, *others = (_absolute(path, each) for each in (self.name, *self.other_names))
        return replace(self, name=name, other_names=tuple(others), stacked=stacked)


def _absolute(path: str, name: str) -> str:
    if name.startswith("."):
        path, name = path.rpartition(".")[0], name[1:]
    return f"{path}.{name}" if path else name


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One matrix or vector of the checkpoint, and the range of it that this rank keeps along `dim`."""

    shape: tuple[int, ...]
    dim: int
    kept: ShardRange
    tensor: CheckpointTensor | None = None
    """The tensor that holds it; None: that of its module, named as `stored` says or as the layer's weight."""
    reading: Reading = ReadRange()
    """How it is read from that tensor."""
    stored: StoredTensor = PLAIN.tensors[0]
    """Its dtypes and random numbers; if it has a `matrix`, which of the tensors that store it."""
    matrix: tuple[int, int] | None = None
    """Shape of the whole matrix; None: a vector, or a matrix that no scheme stores."""
    module: int | None = None
    """Number of its module among those that are fused; None: in their order, as the shards."""

    @property
    def elsewhere(self) -> bool:
        """Whether other ranks keep all of it: it is known, and neither needed nor read."""
        return self.kept.size == 0

    def of(self, stored: StoredTensor) -> "ShardSpec":
        """The same shard of one of the tensors that store this matrix."""
        outputs, inputs = self.shape
        shape = stored.shape((outputs, inputs))
        kept = self.kept.in_units(stored.unit[self.dim])
        if self.dim == 1 and stored.all_inputs:
            kept = ShardRange.whole(shape[1])
        return replace(
            self,
            shape=shape,
            kept=kept,
            reading=self._reading(stored),
            stored=stored,
            matrix=(outputs, inputs),
        )

    def _reading(self, stored: StoredTensor) -> Reading:
        """How the range of this matrix is read from one of the tensors that store it."""
        if stored.packing is not None:
            return self._packed(stored, stored.packing)
        decode = stored.decode
        if decode is None:
            return ReadRange()
        outputs, inputs = self.shape
        return ReadDecoded(lambda tensor: decode(tensor, (outputs, inputs)))

    def _packed(self, stored: StoredTensor, packing: Packing) -> ReadPacked:
        parts = [slice(None), slice(None)]
        if self.dim == 0 or not stored.all_inputs:
            kept = self.kept.in_units(packing.unit[self.dim])
            parts[self.dim] = slice(kept.start, kept.start + kept.size)
        if packing.vector:
            return ReadPacked((parts[1],), lambda part: packing.unpack(part[None]))
        if packing.transposed:
            return ReadPacked((parts[1], parts[0]), lambda part: packing.unpack(part.t()))
        return ReadPacked((parts[0], parts[1]), packing.unpack)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.kept.size, *self.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """The kept range, as an index into the whole tensor."""
        return (*[slice(None)] * self.dim, slice(self.kept.start, self.kept.start + self.kept.size))


class OnlineQuantizedMatrix:
    """A plain matrix of the checkpoint that is quantized while it is loaded, a few rows at a time."""

    def __init__(
        self,
        scheme: Scheme,
        quantize: Callable[[Tensor], tuple[Tensor, ...]],
        parts: Sequence[ShardSpec],
        dtype: torch.dtype,
    ):
        self.scheme = scheme
        self._quantize = quantize
        self.dtype = dtype
        whole_rows = any(stored.unit[1] == WHOLE for stored in scheme.tensors)
        cut = next((part.kept for part in parts if part.dim == 1), None)
        self._kept_inputs = cut if whole_rows else None
        """The inputs to keep of the rows that are read, which share a scale on all ranks; None: all."""
        self.to_read = tuple(self._read_by(part) for part in parts)
        """The shards of the plain matrix."""
        self._starts = self._rows_of_parts(parts)

    def _rows_of_parts(self, parts: Sequence[ShardSpec]) -> dict[int, list[int]]:
        """First row of each part -> its first row in each of the scheme's tensors."""
        found = {}
        row = 0
        rows = [0] * len(self.scheme.tensors)
        for part in parts:
            found[row] = list(rows)
            row += part.kept_shape[0]
            sizes = (part.of(stored).kept_shape[0] for stored in self.scheme.tensors)
            rows = [before + size for before, size in zip(rows, sizes, strict=True)]
        return found

    def _read_by(self, part: ShardSpec) -> ShardSpec:
        """The shard, or its whole rows."""
        if self._kept_inputs is None or part.dim == 0:
            return part
        return replace(part, kept=ShardRange.whole(part.kept.total))

    def store(self, part: Tensor, buffers: Sequence[Tensor], first_row: int) -> None:
        """Quantize a part of the matrix, from `first_row` on, into the buffers of the scheme's tensors."""
        unit = self.scheme.unit[0]
        each = max(_QUANTIZED_AT_ONCE // max(part.shape[1], 1) // unit, 1) * unit
        starts = self._starts[first_row]
        for start in range(0, part.shape[0], each):
            tensors = self._quantize(part[start : start + each].to(buffers[0].device, self.dtype))
            for stored, buffer, row, tensor in zip(
                self.scheme.tensors, buffers, starts, tensors, strict=True
            ):
                first = row + start // stored.unit[0]
                buffer.narrow(0, first, tensor.shape[0]).copy_(self._kept(tensor, stored))

    def _kept(self, tensor: Tensor, stored: StoredTensor) -> Tensor:
        if self._kept_inputs is None:
            return tensor
        kept = self._kept_inputs.in_units(stored.unit[1])
        return tensor.narrow(1, kept.start, kept.size)


class WeightedLayer(nn.Module):
    """Base of every layer with weights. The shards `shards[name]` fill buffer `name`, stacked along rows."""

    shards: dict[str, tuple[ShardSpec, ...]]
    prefix: str | None
    """Path in the checkpoint, by which a quantization scheme was chosen; None where there is no choice."""
    dequantizes: bool = False
    """Whether a quantized matrix becomes a plain one when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = {}
        self.prefix = None
        self._dtype = torch.float32
        self._schemes: dict[str, Scheme] = {}
        self._online: dict[str, OnlineQuantizedMatrix] = {}

    def add_weight(
        self, name: str, shards: Sequence[ShardSpec], build: BuildContext, dtype: torch.dtype | None = None
    ) -> None:
        """Register the uninitialised buffer `name`, large enough for its shards."""
        self._add_buffer(name, shards, build, dtype)
        self.shards[name] = tuple(shards)

    def _add_buffer(
        self, name: str, shards: Sequence[ShardSpec], build: BuildContext, dtype: torch.dtype | None
    ) -> None:
        rows = sum(shard.kept_shape[0] for shard in shards)
        shape = (rows, *shards[0].kept_shape[1:])
        self.register_buffer(name, torch.empty(shape, dtype=dtype or build.dtype, device=build.device))

    def add_matrix(self, name: str, scheme: Scheme, shards: Sequence[ShardSpec], build: BuildContext) -> None:
        """Register the buffers of the matrix `name`, stacked from `shards` [O, I] as `scheme` stores them.

        Raises ValueError where a shard would cut a block of the scheme.
        """
        check_blocks(scheme, shards, build)
        stored_shards = {stored: [shard.of(stored) for shard in shards] for stored in scheme.in_checkpoint}
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
        self._dtype = build.dtype
        self._schemes[name] = scheme
        if scheme.quantize is not None:
            (parts,) = shards.values()
            self._online[name] = OnlineQuantizedMatrix(scheme, scheme.quantize, parts, build.dtype)
            self.shards[name] = self._online[name].to_read
            for stored in scheme.tensors:
                self._add_buffer(name + stored.suffix, [p.of(stored) for p in parts], build, stored.dtype)
            return
        for stored, parts in shards.items():
            self.add_weight(name + stored.suffix, parts, build, stored.dtype)

    def device_of(self, name: str) -> torch.device:
        """Where the weight `name` of `shards` is."""
        online = self._online.get(name)
        return self.get_buffer(name if online is None else name + online.scheme.tensors[0].suffix).device

    def rows_to_fill(self, name: str, first_row: int, shape: tuple[int, ...]) -> Tensor:
        """Rows of the weight `name` of `shards`, as a view; new ones where they are quantized."""
        online = self._online.get(name)
        if online is None:
            return self.get_buffer(name).narrow(0, first_row, shape[0])
        return torch.empty(shape, dtype=online.dtype, device=self.device_of(name))

    def quantizes(self, name: str) -> bool:
        """Whether the weight `name` of `shards` is quantized while it is loaded."""
        return name in self._online

    def store(self, name: str, first_row: int, part: Tensor) -> None:
        """Copy a loaded shard of the weight `name` of `shards` to its rows, or quantize it to them."""
        online = self._online.get(name)
        if online is None:
            self.get_buffer(name).narrow(0, first_row, part.shape[0]).copy_(part)
            return
        buffers = [self.get_buffer(name + stored.suffix) for stored in online.scheme.tensors]
        online.store(part, buffers, first_row)

    def loaded(self, name: str, experts: int | None = None) -> Weight:
        """The weight [O, I] of the matrix `name` from its loaded buffers, or [X, O, I] of X `experts`."""
        scheme = self._schemes.get(name, PLAIN)
        buffers = [self.get_buffer(name + stored.suffix) for stored in scheme.tensors]
        if experts is not None:
            buffers = [buffer.unflatten(0, (experts, -1)) for buffer in buffers]
        return scheme.weight(*buffers)

    def dequantized(self, weight: Weight) -> Tensor:
        """A loaded weight as a plain one, in the compute dtype."""
        if isinstance(weight, Tensor):
            return weight
        assert isinstance(weight, Quantized), "loaded and not yet packed"
        return weight.dequantized(self._dtype)

    def remove_matrix(self, name: str) -> None:
        """Remove the buffers of the matrix `name`."""
        for stored in self._schemes[name].tensors:
            delattr(self, name + stored.suffix)

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
        what = _DIMS[shard.dim]
        unit = scheme.unit[shard.dim]
        kept = shard.kept
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
