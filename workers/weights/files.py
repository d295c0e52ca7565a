"""The safetensors files of a checkpoint directory."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from atom.shared.utils import envs
from workers.checkpoint.checkpoint_files import INDEX, LANGUAGE_MODEL, tensors_by_file, tensors_in

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile(Protocol):
    """An open file; reads only the requested range."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Name of the dtype, as in safetensors."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """The part of a tensor within these ranges, one for each of its first dimensions; () is all."""


class TensorSource(Protocol):
    """One tensor, in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """The part within these ranges, one for each of the first dimensions; () is all."""


@dataclass(frozen=True, slots=True)
class TensorInMemory:
    """A `TensorSource` over a tensor."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor[index]


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A `TensorSource` over an open file, which reads only the requested range."""

    file: TensorFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shape(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Raises ValueError for one that torch does not have."""
        name = self.file.dtype(self.name)
        if name not in _DTYPES:
            raise ValueError(f"{self.name} has dtype {name}, which is not supported")
        return _DTYPES[name]

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.file.read(self.name, index)


class _MappedFile:
    def __init__(self, path: Path, file: Any):
        self._path = path
        self._file = file
        self._names = frozenset(file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        dtype: str = self._slice(name).get_dtype()
        return dtype

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[index] if index else self._file.get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._names:
            raise _not_held(self._path, name)
        return self._file.get_slice(name)


class _UnmappedFile:
    """Reads the requested rows into newly allocated memory; maps no page of the file."""

    def __init__(self, path: Path, file: BufferedReader):
        self._path = path
        self._file = file
        self._start, self._tensors = tensors_in(path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header(name)["shape"])

    def dtype(self, name: str) -> str:
        dtype: str = self._header(name)["dtype"]
        return dtype

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        header = self._header(name)
        first = 0
        last = 1
        shape = tuple(header["shape"])
        if index:
            first, last, _ = index[0].indices(shape[0])
            shape = (last - first, *shape[1:])
        dtype = _DTYPES[header["dtype"]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        content = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        self._file.seek(self._start + header["data_offsets"][0] + first * row_bytes)
        if self._file.readinto(content.numpy().data) != len(content):
            raise ValueError(f"{self._path} ends within {name}: the file was truncated while it was read")
        return content.view(dtype).view(shape)[index and (slice(None), *index[1:])]

    def _header(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise _not_held(self._path, name)
        header: dict[str, Any] = self._tensors[name]
        if header["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {self._path} has dtype {header['dtype']}, which is not supported")
        begin, end = header["data_offsets"]
        if end - begin != math.prod(header["shape"]) * _DTYPES[header["dtype"]].itemsize:
            raise ValueError(
                f"{self._path} is damaged: {name} has {end - begin} bytes, which is not the size of "
                f"{header['shape']} in {header['dtype']}; fetch it again"
            )
        return header


def _not_held(path: Path, name: str) -> ValueError:
    return ValueError(f"{path} does not hold {name}, which {INDEX} places there")


@contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """A safetensors file, mapped into memory; with ATOM_DISABLE_MMAP (slow network mounts) read by ranges.

    Raises ValueError if it is not a safetensors file.
    """
    if envs.ATOM_DISABLE_MMAP:
        with path.open("rb") as stream:
            yield _UnmappedFile(path, stream)
        return
    try:
        mapped = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
    with mapped as file:
        yield _MappedFile(path, file)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is stored."""

    file: Path
    name: str


_DENSE_MLP = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")


def model_name(stored: str, beginnings: Mapping[str, str]) -> str:
    """The name that a tensor has in a published checkpoint of its language model alone.

    Multimodal checkpoints have language_model.model.… or model.language_model.… in place of model.…;
    transformers saves dense MLPs under the name of those with experts, where the two differ (Kimi-Linear).
    `beginnings`: those of names in the family's own checkpoints, and what they become.
    """
    name = _DENSE_MLP.sub(r".mlp.\1", stored.replace(LANGUAGE_MODEL, "", 1))
    own = next((each for each in beginnings if name.startswith(each)), None)
    return name if own is None else beginnings[own] + name.removeprefix(own)


def tensor_places(directory: Path, beginnings: Mapping[str, str]) -> dict[str, TensorPlace]:
    """All tensors by their `model_name`. Raises ValueError for two tensors of one name."""
    places: dict[str, TensorPlace] = {}
    for path, stored in tensors_by_file(directory).items():
        for name in stored:
            place = places.setdefault(model_name(name, beginnings), TensorPlace(path, name))
            if place.name != name:
                raise ValueError(f"{directory} holds both {place.name} and {name}, which are the same tensor")
    return places


def tensors_in_order(
    places: Mapping[str, TensorPlace], names: Iterable[str]
) -> Iterator[tuple[str, TensorSource]]:
    """The named tensors, in their order but one file after the other; a file is open while it is read."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(places[name].file, []).append(name)
    for path, held in by_file.items():
        with open_file(path) as file:
            for name in held:
                yield name, TensorInFile(file, places[name].name)
