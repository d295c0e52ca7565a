"""Finds the safetensors files of a directory, and checks that they are complete, by their headers.

8 bytes  size N of the header, little-endian
N bytes  JSON: {"name": {"dtype": …, "shape": …, "data_offsets": [begin, end]}, …}
rest     the tensors; the largest `end` is the size of this part
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# Copies in the format of Mistral, with other names of tensors.
_OTHER_FORMATS = "consolidated*"

LANGUAGE_MODEL = "language_model."
"""In the names of a multimodal checkpoint's modules that its language model has without it when alone."""
_MAX_HEADER = 100 * 1024 * 1024
_LENGTH_BYTES = 8


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_weights(directory: Path) -> None:
    """Raise ValueError if the directory has no safetensors files, or one of them is missing or damaged."""
    for path in tensors_by_file(directory):
        expected = _size(path)
        actual = path.stat().st_size
        if actual != expected:
            raise ValueError(
                f"{path} is damaged: it has {actual} bytes, and its header says {expected}; fetch it again"
            )


def tensors_by_file(directory: Path) -> dict[Path, list[str]]:
    """Names of the tensors in each file: those of the index, one file, or shards without an index.

    Raises ValueError for a directory without weights, or with a part of them.
    """
    index = directory / INDEX
    if index.exists():
        return _from_index(directory, index)
    single = directory / _SINGLE
    files = [single] if single.exists() else _shards(directory)
    found = {path: list(tensors_in(path)[1]) for path in files}
    seen: dict[str, Path] = {}
    for path, names in found.items():
        for name in names:
            if (other := seen.setdefault(name, path)) != path:
                raise ValueError(
                    f"{directory} has no {INDEX}, and {name} is both in {other.name} and in {path.name}"
                )
    return found


def _from_index(directory: Path, index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise ValueError(f"{index} does not state the file of each tensor: {error}") from None
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file or file in ("", ".."):
            raise ValueError(f"{index} names {file!r}, which is not a file next to it")
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file} is missing; {INDEX} names it for {name}")
        files.setdefault(directory / file, []).append(name)
    return files


def _shards(directory: Path) -> list[Path]:
    """The safetensors files of a directory without an index. Raises ValueError if a shard is missing."""
    every = sorted(directory.glob("*.safetensors"))
    files = [path for path in every if not path.match(_OTHER_FORMATS)]
    if every and not files:
        raise ValueError(
            f"{directory} has weights in the format of Mistral only ({every[0].name}), which is not "
            "supported: take the copy in the format of Hugging Face, with model.safetensors or its shards"
        )
    if not files:
        raise ValueError(
            f"{directory} has no safetensors files: other formats (.bin, .pt, Mistral's consolidated) are "
            "not supported, save the model as safetensors (--load-dummy runs without weights)"
        )
    names = {path.name for path in files}
    for found in filter(None, map(_SHARD.fullmatch, sorted(names))):
        stem, number, total = found.groups()
        for part in range(1, int(total) + 1):
            if (name := f"{stem}-{part:0{len(number)}}-of-{total}.safetensors") not in names:
                raise ValueError(f"{directory / name} is missing: fetch it")
    return files


def tensors_in(path: Path) -> tuple[int, dict[str, Any]]:
    """The byte where the tensors start, and the header's entry of each tensor by name.

    Raises ValueError if it is not a safetensors file.
    """
    length, header = _header(path)
    described = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    for name, tensor in described.items():
        if not _is_entry(tensor):
            raise ValueError(
                f"{path} is not a safetensors file: its header lacks dtype, shape or offsets of {name}"
            )
    return _LENGTH_BYTES + length, described


def _is_entry(entry: object) -> bool:
    """Whether it is a header's entry of a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    numbers = entry.get("shape"), entry.get("data_offsets")
    if not all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in numbers):
        return False
    offsets: list[int] = entry["data_offsets"]
    return len(offsets) == 2 and offsets[0] <= offsets[1]


def _size(path: Path) -> int:
    start, tensors = tensors_in(path)
    return start + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data = file.read(length) if length <= _MAX_HEADER else b""
    try:
        header = json.loads(data)
    except ValueError:
        raise ValueError(f"{path} is not a complete safetensors file: its header is unreadable") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
    return length, header
