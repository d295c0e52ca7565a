"""Checks that the safetensors files of a directory are complete, by their headers.

8 bytes  size N of the header, little-endian
N bytes  JSON: {"name": {"dtype": …, "shape": …, "data_offsets": [begin, end]}, …}
rest     the tensors; the largest `end` is the size of this part
"""

import json
from pathlib import Path
from typing import Any

LANGUAGE_MODEL = "language_model."
"""In the names of a multimodal checkpoint's modules that its language model has without it when alone."""
_MAX_HEADER = 100 * 1024 * 1024
_LENGTH_BYTES = 8


def check_weights(directory: Path) -> None:
    """Raise ValueError if the directory has no safetensors files or a truncated one."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{directory} has no safetensors files: other formats (.bin, .pt) are not supported, save the "
            "model as safetensors (--load-dummy runs without weights)"
        )
    for path in files:
        expected = _size(path)
        actual = path.stat().st_size
        if actual != expected:
            raise ValueError(
                f"{path} is damaged: it has {actual} bytes, and its header says {expected}; fetch it again"
            )


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
