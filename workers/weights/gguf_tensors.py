"""Which tensors of a GGUF file make each tensor of the checkpoint, where llama.cpp stores another form.

    llama.cpp                                        checkpoint
    ffn_{gate,up,down}_exps [X, O, I]                a matrix of each expert; GPT-OSS: stacks of all
    ffn_gate_up_exps [X, 2F, D]                      gate and up of each expert
    attn_k_b [heads, rank, nope], attn_v_b [heads, value, rank]   kv_b_proj [heads * (nope + value), rank]
    attn_qkv, attn_gate: all queries, keys, values, z             in_proj_qkvz: those of each key head
    ssm_a = -exp(A_log)                              A_log
    ssm_conv1d_{q,k,v}, ssm_dt, ssm_f_{a,b}          {q,k,v}_conv1d, dt_bias, f_{a,b}_proj    (Kimi-Linear)
    value heads: the first of each key head, …       all of the first key head, …    (Qwen3.5)
    norms plus 1, rotated features as neighbours     as in the family

X experts, D hidden, F features of an expert.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.weights.gguf_families import GGUFFamily

Array = NDArray[Any]
Shape = tuple[int, ...]
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
# As llama.cpp's converter calls them before it looks names up.
_RENAMED = {"e_score_correction_bias": "e_score_correction.bias", ".dt_bias": ".dt_proj.bias"}
# Modules that the checkpoint has where its experts are.
_WITH_EXPERTS = re.compile(r"\.mlp\.(experts\.|gate\.|shared_expert|e_score_correction)")
_FORGET_GATE = {
    "f_a_proj.weight": "ssm_f_a.weight",
    "f_b_proj.weight": "ssm_f_b.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
}
_STACKED = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint, and what it is made of."""

    name: str
    tensors: tuple[gguf.ReaderTensor, ...]
    shape: Shape
    rows: Callable[..., Array]
    """Maps the data of `tensors` to rows of the checkpoint's: in the file's types if all have the same, else
    as numbers."""
    plain: bool = False
    """Whether `rows` needs numbers."""
    transposed: bool = False
    """Whether the checkpoint has numbers of stacked matrices with inputs first."""
    tiles: tuple[int, int] | None = None
    """(value heads of each key head, key heads), if the inputs are value heads in tiles."""

    @property
    def stacked(self) -> bool:
        """Whether it is all experts' matrices."""
        return self.name.endswith(_STACKED)

    @property
    def kind(self) -> gguf.GGMLQuantizationType | None:
        """The type of its rows; None: they are numbers."""
        kinds = {tensor.tensor_type for tensor in self.tensors}
        return None if self.plain or len(kinds) > 1 else next(iter(kinds))

    def data(self) -> Array:
        """Its rows, in the type `kind`."""
        if self.kind is not None:
            return self.rows(*(tensor.data for tensor in self.tensors))
        return self.rows(*map(_numbers, self.tensors))

    def in_order(self, stored: Tensor) -> Tensor:
        """A tensor that stores the matrix, an entry for each group of inputs, in the checkpoint's order."""
        if self.tiles is None:
            return stored
        return stored.unflatten(-1, (*self.tiles, -1)).transpose(-3, -2).flatten(-3)


class HeldTensors:
    """The tensors of the first `layers` layers of a file, and those of no layer."""

    def __init__(self, reader: gguf.GGUFReader, layers: int, file: str):
        self._tensors = {tensor.name: tensor for tensor in reader.tensors if _layer(tensor.name) < layers}
        self._file = file
        self._unused = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, stored: str | None, shape: Shape, wanted: str) -> gguf.ReaderTensor:
        """The tensor of that shape. Raises ValueError, with the checkpoint's name, if there is none."""
        tensor = self._tensors.get(stored or "")
        # Older converters leave out dimensions of one entry.
        if tensor is None or _without_ones(reversed(tensor.shape)) != _without_ones(shape):
            raise ValueError(f"{self._file} lacks {wanted} in the shape that transformers expects")
        self._unused.discard(tensor.name)
        return tensor

    def check_all_used(self, settings: frozenset[str]) -> None:
        """Raise ValueError for a tensor that was not taken and is not among the `settings`."""
        if unused := self._unused - settings:
            raise ValueError(f"{self._file} holds a tensor {min(unused)!r}, which is not supported")


class Maker:
    """Makes the parts of one model."""

    def __init__(self, held: HeldTensors, config: Any, architecture: str, family: GGUFFamily):
        self._held = held
        self._config = config
        self._family = family
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        number = numbers[family.names_of or architecture]
        # One more: a layer for multi-token prediction.
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers + 1)

    def parts(self, weights: Mapping[str, Tensor]) -> Iterator[Part]:
        """Those of all these tensors of the model. Raises ValueError for one that the file lacks."""
        for name, tensor in weights.items():
            if self._config.tie_word_embeddings and name == "lm_head.weight":
                continue
            asked = name
            for written, converted in _RENAMED.items():
                asked = asked.replace(written, converted)
            found = self._names.get_name(asked, try_suffixes=(".weight", ".bias"))
            stored = next((each for each in (found, f"{found}.weight") if each in self._held), None)
            yield from self.make(name, tuple(tensor.shape), stored)

    def make(self, name: str, shape: Shape, stored: str | None) -> Iterator[Part]:
        """The parts of one tensor of the model; `stored` is the file's tensor, if it is a single one."""
        layer = f"blk.{_layer(name)}"
        written = _WITH_EXPERTS.sub(rf".{self._family.experts_in}.\1", name)
        if name.endswith((*_STACKED, "experts.gate_up_proj_bias", "experts.down_proj_bias")):
            yield from self._experts(written, shape, f"{layer}.ffn")
        elif stored is None and name.endswith("kv_b_proj.weight"):
            yield self._latent_up(name, shape, layer)
        elif stored is None and name.endswith("in_proj_qkvz.weight"):
            yield self._by_key_head(name, shape, layer)
        elif name.endswith("self_attn.conv1d.weight"):
            yield from self._convolutions(name, shape, layer)
        elif ".forget_gate." in name:
            yield self._forget_gate(name, shape, layer)
        else:
            yield self._single(written, shape, self._held.take(stored, shape, name))

    def _single(self, name: str, shape: Shape, tensor: gguf.ReaderTensor) -> Part:
        offset = np.float32(self._family.norm_offset)
        module, _, last = name.rpartition(".")
        if offset and name.endswith("norm.weight") and not module.endswith("linear_attn.norm"):
            return Part(name, (tensor,), shape, lambda data: data - offset, plain=True)
        if self._family.rotates_neighbours and name.endswith(_ROTATED):
            return Part(name, (tensor,), shape, partial(_halves, self._heads(name)))
        if ".linear_attn." not in name:
            return Part(name, (tensor,), shape, _same)
        return self._linear_attention(name, shape, tensor, last)

    def _heads(self, name: str) -> int:
        config = self._config
        return int(config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)

    def _linear_attention(self, name: str, shape: Shape, tensor: gguf.ReaderTensor, last: str) -> Part:
        config, tiled = self._config, self._family.tiled_values
        keys = int(config.linear_num_key_heads)
        tiles = int(config.linear_num_value_heads) // keys
        module = name.rpartition(".")[0].rpartition(".")[2]
        by_tile = partial(_by_key, tiles, keys) if tiled else _same
        if last == "A_log":
            return Part(name, (tensor,), shape, lambda data: np.log(-by_tile(data)), plain=True)
        if module == "conv1d":
            first = 2 * keys * int(config.linear_key_head_dim)
            return Part(
                name, (tensor,), shape, lambda data: _after(first, by_tile, data).reshape(shape), plain=True
            )
        if not tiled or module == "norm":
            return Part(name, (tensor,), shape, _same)
        if module == "out_proj":
            return Part(name, (tensor,), shape, _same, tiles=(tiles, keys))
        if module == "in_proj_qkv":
            first = 2 * keys * int(config.linear_key_head_dim)
            return Part(name, (tensor,), shape, partial(_after, first, by_tile))
        return Part(name, (tensor,), shape, by_tile)

    def _latent_up(self, name: str, shape: Shape, layer: str) -> Part:
        heads, rank = int(self._config.num_attention_heads), shape[1]
        nope, value = int(self._config.qk_nope_head_dim), int(self._config.v_head_dim)
        keys = self._held.take(f"{layer}.attn_k_b.weight", (heads, rank, nope), name)
        values = self._held.take(f"{layer}.attn_v_b.weight", (heads, value, rank), name)

        def joined(keys_HRN: Array, values_HVR: Array) -> Array:
            return np.concatenate((keys_HRN.swapaxes(1, 2), values_HVR), 1).reshape(shape)

        return Part(name, (keys, values), shape, joined, plain=True)

    def _by_key_head(self, name: str, shape: Shape, layer: str) -> Part:
        config = self._config
        keys, width = int(config.linear_num_key_heads), int(config.linear_key_head_dim)
        of_values = int(config.linear_num_value_heads) * int(config.linear_value_head_dim)
        before = 2 * keys * width
        qkv = self._held.take(f"{layer}.attn_qkv.weight", (before + of_values, shape[1]), name)
        gate = self._held.take(f"{layer}.attn_gate.weight", (of_values, shape[1]), name)

        def by_head(qkv_OI: Array, z_OI: Array) -> Array:
            kinds = (*np.split(qkv_OI, (keys * width, before)), z_OI)
            rows = [kind.reshape(keys, -1, kind.shape[1]) for kind in kinds]
            return np.concatenate(rows, 1).reshape(-1, qkv_OI.shape[1])

        return Part(name, (qkv, gate), shape, by_head)

    def _convolutions(self, name: str, shape: Shape, layer: str) -> Iterator[Part]:
        """Those of queries, keys and values, which transformers joins."""
        size = (shape[0] // 3, *shape[1:])
        for each in "qkv":
            tensor = self._held.take(f"{layer}.ssm_conv1d_{each}.weight", size, name)
            written = name.replace("conv1d", f"{each}_conv1d")
            yield Part(written, (tensor,), size, lambda data: data.reshape(size), plain=True)

    def _forget_gate(self, name: str, shape: Shape, layer: str) -> Part:
        """Kimi delta attention has it in a module of its own in transformers alone."""
        written = name.replace("forget_gate.", "")
        tensor = self._held.take(f"{layer}.{_FORGET_GATE[written.partition('self_attn.')[2]]}", shape, name)
        if not name.endswith("A_log"):
            return Part(written, (tensor,), shape, _same)
        return Part(written, (tensor,), shape, lambda data: np.log(-data).reshape(shape), plain=True)

    def _experts(self, name: str, shape: Shape, stored: str) -> Iterator[Part]:
        if self._family.expert_names is None:
            yield self._stacked(name, shape, stored)
            return
        gate, up, down = self._family.expert_names
        parent = name.rpartition(".")[0]
        count, outputs, inputs = shape
        if self._family.inputs_first:
            outputs, inputs = inputs, outputs
        if name.endswith("down_proj"):
            tensor = self._held.take(f"{stored}_down_exps.weight", (count, outputs, inputs), name)
            yield from _each(parent, down, tensor, count, slice(outputs), (outputs, inputs))
            return
        half = outputs // 2
        together = f"{stored}_gate_up_exps.weight"
        for number, (part, kind) in enumerate(((gate, "gate"), (up, "up"))):
            if together in self._held:
                tensor = self._held.take(together, (count, outputs, inputs), name)
                first = number * half
            else:
                tensor = self._held.take(f"{stored}_{kind}_exps.weight", (count, half, inputs), name)
                first = 0
            yield from _each(parent, part, tensor, count, slice(first, first + half), (half, inputs))

    def _stacked(self, name: str, shape: Shape, stored: str) -> Part:
        """GPT-OSS: gate and up of a feature follow each other; inputs before outputs where it is plain."""
        suffix = "bias" if name.endswith("_bias") else "weight"
        kinds = ("down",) if "down_proj" in name else ("gate", "up")
        count, *sizes = shape
        outputs = sizes[-1] // len(kinds)
        held = (count, outputs) if suffix == "bias" else (count, outputs, sizes[0])
        found = tuple(self._held.take(f"{stored}_{kind}_exps.{suffix}", held, name) for kind in kinds)
        return Part(name, found, shape, _interleaved, transposed=suffix == "weight")


def _each(
    parent: str, matrix: str, tensor: gguf.ReaderTensor, count: int, rows: slice, shape: Shape
) -> Iterator[Part]:
    """The matrix of each expert, from a stack."""
    for expert in range(count):
        yield Part(f"{parent}.{expert}.{matrix}.weight", (tensor,), shape, partial(_entry, expert, rows))


def _same(data: Array) -> Array:
    return data


def _entry(number: int, rows: slice, data: Array) -> Array:
    return data[number, rows]


def _interleaved(*stacks: Array) -> Array:
    """Rows of several stacks [X, O, …] in turn."""
    return np.stack(stacks, 2).reshape(len(stacks[0]), -1, *stacks[0].shape[2:])


def _halves(heads: int, data: Array) -> Array:
    """Features that llama.cpp rotates as neighbours, as transformers does: in the halves of a head."""
    pairs = data.reshape(heads, -1, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


def _by_key(tiles: int, keys: int, data: Array) -> Array:
    """Value heads of each key head together, from tiles with one of each."""
    heads = data.reshape(tiles, keys, -1, *data.shape[1:])
    return heads.swapaxes(0, 1).reshape(data.shape)


def _after(first: int, change: Callable[[Array], Array], data: Array) -> Array:
    return np.concatenate((data[:first], change(data[first:])))


def _numbers(tensor: gguf.ReaderTensor) -> Array:
    found: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return found


def _layer(name: str) -> int:
    """The number in blk.N. or .layers.N.; -1 without one."""
    numbers = [part for part in name.split(".")[:4] if part.isdecimal()]
    return int(numbers[0]) if numbers else -1


def _without_ones(shape: Any) -> Shape:
    return tuple(int(size) for size in shape if size != 1)
