"""Finds the end-of-sequence ids of a checkpoint, which several of its files state.

The first of --hf-overrides, generation_config.json and config.json that states any is used, as in
transformers, and besides it the eos_token of the tokenizer: fine-tuned models often change only that one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.checkpoint.config_values import id_list
from workers.checkpoint.tokenizer_files import token_id

__all__ = ["EndTokens", "end_tokens"]

_NAME = "eos_token_id"
_FLAG = "--hf-overrides"


@dataclass(frozen=True)
class EndTokens:
    """The ids that end a sequence."""

    ids: list[int]
    warnings: list[str] = field(default_factory=list)


def end_tokens(
    sources: Mapping[str, Mapping[str, Any]],
    tokenizer: Path | None,
    text: str | None,
    vocab_size: int,
    directory: Path,
) -> EndTokens:
    """The ids inside the vocabulary; `sources` by their names, the most important first.

    `text` is the eos_token of the tokenizer. null in a file states nothing, in --hf-overrides that there is
    no such id. Raises ValueError for an invalid value.
    """
    if _NAME in sources[_FLAG]:  # the user's choice, not the first of several
        return EndTokens(_valid(sources[_FLAG][_NAME], vocab_size, directory))
    stated = {name: _valid(source.get(_NAME), vocab_size, directory) for name, source in sources.items()}
    name, ids = next(((name, ids) for name, ids in stated.items() if ids), ("", []))
    own = token_id(tokenizer, text) if tokenizer and text else None
    if own is None or own in ids or own >= vocab_size:
        return EndTokens(ids)
    if not ids:
        return EndTokens([own])
    warning = (
        f"{name} ends sequences with the ids {', '.join(map(str, ids))}, and the tokenizer with {text} "
        f"({own}): each of them ends one"
    )
    return EndTokens([*ids, own], [warning])


def _valid(value: Any, vocab_size: int, directory: Path) -> list[int]:
    return [token for token in id_list(value, _NAME, directory) if 0 <= token < vocab_size]
