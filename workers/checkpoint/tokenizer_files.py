"""Finds a checkpoint's tokenizer, or makes a tokenizer.json of the files that it has in place of one.

    tokenizer.json                               itself, completed with tokens that other files add
    tiktoken.model (Kimi), tekken.json (Mistral) converted here
    tokenizer.model, vocab.json, …               converted by transformers

What is made is kept in a cache directory.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from workers.checkpoint.added_tokens import missing_tokens, stated_by_id
from workers.checkpoint.atomic_file import write_atomically
from workers.checkpoint.byte_pairs import TEKKEN, TIKTOKEN, tekken_tokenizer, tiktoken_tokenizer

__all__ = ["TokenizerFile", "adds_token", "find_tokenizer", "token_id", "token_text"]

# To be increased when a conversion changes its output, so that older ones are not used.
_FORMAT = 1
_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_SLOW_FILES = (*_SENTENCEPIECE, "vocab.json", "vocab.txt")
_SHOWN_TOKENS = 5


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer.json to use."""

    path: Path | None
    """None: the checkpoint has no tokenizer."""
    warnings: list[str] = field(default_factory=list)


class _TokenizerJson(msgspec.Struct):
    """The only parts of tokenizer.json that are decoded."""

    added_tokens: list[dict[str, Any]] = []
    post_processor: Any = None


def find_tokenizer(
    directory: Path, config: Mapping[str, Any], vocab_size: int, cache_dir: Path
) -> TokenizerFile:
    """The tokenizer in `directory`; one that must be made is written to `cache_dir`.

    `config` is tokenizer_config.json. Raises ValueError, in one line, for one that cannot be used.
    """
    own = directory / "tokenizer.json"
    if own.exists():
        return _completed(own, directory, config, vocab_size, cache_dir)
    if (path := directory / TIKTOKEN).exists():
        return TokenizerFile(_kept([path], cache_dir, lambda: tiktoken_tokenizer(path, config)))
    if (path := directory / TEKKEN).exists():
        return TokenizerFile(_kept([path], cache_dir, lambda: tekken_tokenizer(path)))
    sources = [directory / name for name in _SLOW_FILES if (directory / name).exists()]
    return TokenizerFile(_kept(sources, cache_dir, lambda: _slow(directory, sources)) if sources else None)


def token_id(path: Path, text: str) -> int | None:
    """The id of an added token of a tokenizer.json; None if it has no such token."""
    added = _read(path).added_tokens
    return next((entry["id"] for entry in added if entry["content"] == text), None)


def token_text(path: Path, number: int) -> str | None:
    """The text of an added token of a tokenizer.json; None if it has no such token."""
    added = _read(path).added_tokens
    return next((entry["content"] for entry in added if entry["id"] == number), None)


def adds_token(path: Path, text: str) -> bool:
    """Whether the post-processor of a tokenizer.json adds a token."""
    return text in json.dumps(_read(path).post_processor, ensure_ascii=False)


def _read(path: Path) -> _TokenizerJson:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerJson)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None


def _completed(
    own: Path, directory: Path, config: Mapping[str, Any], vocab_size: int, cache_dir: Path
) -> TokenizerFile:
    """tokenizer.json with the tokens that other files add."""
    missing = missing_tokens(_read(own).added_tokens, directory, config)
    if not missing:
        return TokenizerFile(own)
    made = _loaded(own)
    made.add_tokens(missing)
    warnings = []
    if beyond := [token for token in missing if (made.token_to_id(token.content) or 0) >= vocab_size]:
        warnings.append(
            f"the tokens {_listed(token.content for token in beyond)} of {_CONFIG} are left out: the model's "
            f"vocabulary of {vocab_size} has no place for them"
        )
        missing = [token for token in missing if token not in beyond]
        made = _loaded(own)
        made.add_tokens(missing)
    for number, token in stated_by_id(config, directory).items():
        found = made.token_to_id(token.content)
        if found is not None and found != number:
            warnings.append(
                f"{_CONFIG} states the id {number} for {token.content!r}, which has the id {found} in "
                f"tokenizer.json: {found} is used, as in transformers"
            )
    if not missing:
        return TokenizerFile(own, warnings)
    text = made.to_str()
    path = cache_dir / "tokenizers" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        write_atomically(path, text)
    return TokenizerFile(path, warnings)


def _loaded(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"cannot read {path}: {error}") from error


def _listed(texts: Any) -> str:
    every = [repr(text) for text in texts]
    more = f" and {len(every) - _SHOWN_TOKENS} more" if len(every) > _SHOWN_TOKENS else ""
    return ", ".join(every[:_SHOWN_TOKENS]) + more


def _kept(sources: list[Path], cache_dir: Path, make: Callable[[], str]) -> Path:
    """The tokenizer.json that `make` makes of the files `sources`, made once."""
    config = sources[0].with_name(_CONFIG)
    read = [*sources, config] if config.exists() else sources
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in read]
    digest = hashlib.sha256(repr((_FORMAT, stats)).encode()).hexdigest()[:16]
    path = cache_dir / "tokenizers" / f"{digest}.json"
    if not path.exists():
        write_atomically(path, make())
    return path


def _slow(directory: Path, sources: list[Path]) -> str:
    """A conversion by transformers. Raises ValueError with what is missing."""
    name = sources[0].name
    packages = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
    if name in _SENTENCEPIECE and packages:
        raise ValueError(
            f"{directory} has {name} and no tokenizer.json, and to convert it "
            f"{' and '.join(packages).replace('google.', '')} must be installed (pip install sentencepiece "
            "protobuf); or save the tokenizer as tokenizer.json elsewhere"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text: str = tokenizer.backend_tokenizer.to_str()
    except (ValueError, ImportError, OSError, AttributeError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{directory} has no tokenizer.json, and its {name} cannot be converted: {first_line}"
        ) from error
    return text


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
