"""The safetensors files of a checkpoint directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import safetensors.torch
import torch
from safetensors import safe_open

from atom.utils import envs

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class TensorFile(Protocol):
    """An open file; reads only what is asked for where it is mapped into memory."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor: ...


class _Mapped:
    def __init__(self, file: Any):
        self._file = file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_slice(name)[index]
        return tensor


class _Whole:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][index]


@contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """Mapped into memory, or read as a whole under ATOM_DISABLE_MMAP (slow network mounts)."""
    if envs.ATOM_DISABLE_MMAP:
        yield _Whole(safetensors.torch.load(path.read_bytes()))
    else:
        with safe_open(path, framework="pt") as file:
            yield _Mapped(file)


def tensors_by_file(directory: Path) -> dict[Path, list[str]]:
    """Names of the tensors in each file. Raises ValueError for a directory without weights."""
    index = directory / _INDEX
    if index.exists():
        return _from_index(directory, index)
    single = directory / _SINGLE
    if not single.exists():
        raise ValueError(f"{directory} holds neither {_INDEX} nor {_SINGLE}")
    with safe_open(single, framework="pt") as file:
        return {single: list(file.keys())}


def _from_index(directory: Path, index: Path) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, file in msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.items():
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file beside it")
        if not (directory / file).exists():
            raise ValueError(f"{directory / file} is missing; {_INDEX} names it for {name}")
        files.setdefault(directory / file, []).append(name)
    return files
