"""Decides whether a checkpoint's LM head is tied to its embeddings: its files decide, as in transformers.

A fine-tuned model may have both, with different values, and still tie_word_embeddings in its config.json.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import Checkpoint
from workers.checkpoint.checkpoint_files import tensors_by_file, tensors_in

__all__ = ["with_own_head"]

_TIED = "tie_word_embeddings"
_HEAD = "lm_head."
_HEAD_WEIGHT = "lm_head.weight"
_EMBEDDINGS = "model.embed_tokens.weight"
_CHUNK_BYTES = 1 << 24


def with_own_head(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with untied embeddings and a warning, if its files have another LM head."""
    if not checkpoint.hf_config.get(_TIED) or not _has_own_head(Path(checkpoint.directory)):
        return checkpoint
    warning = (
        f"config.json ties the LM head to the embeddings, but the checkpoint has another {_HEAD_WEIGHT}, "
        f"which is used: set {_TIED} to false there"
    )
    return replace(
        checkpoint,
        hf_config=checkpoint.hf_config | {_TIED: False},
        warnings=[*checkpoint.warnings, warning],
    )


def _has_own_head(directory: Path) -> bool:
    """Whether there is an LM head that is not a copy of the embeddings."""
    file_of = {name: path for path, names in tensors_by_file(directory).items() for name in names}
    head = {name for name in file_of if name.startswith(_HEAD)}
    if not head:
        return False
    if head != {_HEAD_WEIGHT} or _EMBEDDINGS not in file_of:
        return True
    weight, embeddings = (_Stored(file_of[name], name) for name in (_HEAD_WEIGHT, _EMBEDDINGS))
    return weight != embeddings


class _Stored:
    """A tensor in a safetensors file, compared in pieces: both may have gigabytes."""

    def __init__(self, path: Path, name: str):
        start, tensors = tensors_in(path)
        entry: dict[str, Any] = tensors[name]
        self._path = path
        self._form = (entry["dtype"], entry["shape"])
        begin, end = entry["data_offsets"]
        self._begin = start + begin
        self._size = end - begin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Stored) or (self._form, self._size) != (other._form, other._size):
            return False
        return all(mine == theirs for mine, theirs in zip(self._chunks(), other._chunks(), strict=True))

    def _chunks(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._begin)
            for done in range(0, self._size, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, self._size - done))
