"""Finds the added tokens that a checkpoint states outside of tokenizer.json, as transformers does.

They are in tokenizer_config.json (`added_tokens_decoder`, each `…_token`, `additional_special_tokens` and
`extra_special_tokens`), or in older checkpoints in special_tokens_map.json and added_tokens.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from workers.checkpoint.hf_config import read_json

__all__ = ["added_token", "missing_tokens", "stated_by_id"]

_DECODER = "added_tokens_decoder"
_EXTRA = "extra_special_tokens"
_EXTRA_OLD = "additional_special_tokens"
_NAMED = "_token"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def missing_tokens(
    own: Sequence[Mapping[str, Any]], directory: Path, config: Mapping[str, Any]
) -> list[AddedToken]:
    """The tokens to add to a tokenizer that has `own`, the entries of tokenizer.json, in this order.

    `config` is tokenizer_config.json. A token is to be added too if its flags differ. Raises ValueError.
    """
    held = [added_token(entry) for entry in own]
    settings = dict(config)
    stated = stated_by_id(config, directory)
    if _DECODER not in config:
        settings = _with_special_map(settings, directory)
        stated = _legacy(settings, directory) | {entry["id"]: added_token(entry) for entry in own}
    shown = set(map(repr, held))
    found = [stated[number] for number in sorted(stated) if repr(stated[number]) not in shown]
    known = {token.content for token in (*held, *found)}
    by_text = {token.content: token for token in stated.values()}
    named = [_special(value, by_text) for value in _named(settings)]
    names = {token.content for token in named}
    for token in found:
        token.special = token.special or token.content in names
    for token in (*named, *(_special(value, {}) for value in _extra(settings))):
        if token.content not in known:
            known.add(token.content)
            found.append(token)
    return found


def stated_by_id(config: Mapping[str, Any], directory: Path) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder`. Raises ValueError."""
    try:
        return {int(number): added_token(entry) for number, entry in (config.get(_DECODER) or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: {_DECODER} must map ids to objects with a content"
        ) from None


def added_token(entry: Mapping[str, Any], **flags: bool) -> AddedToken:
    """A token from JSON; `flags` have precedence."""
    stated = {name: entry[name] for name in _FLAGS if name in entry}
    return AddedToken(entry["content"], **{**stated, **flags})


def _with_special_map(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The settings of both files; a token of special_tokens_map.json has precedence."""
    older = read_json(directory / "special_tokens_map.json", missing_is_empty=True)
    extra = [*(settings.get(_EXTRA) or ()), *(older.get(_EXTRA) or ())]
    return settings | older | ({_EXTRA: extra} if extra else {})


def _legacy(settings: Mapping[str, Any], directory: Path) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json: {text: id}."""
    special = {_text(value) for value in (*_named(settings), *_extra(settings))}
    found = {}
    for text, number in read_json(directory / "added_tokens.json", missing_is_empty=True).items():
        if type(number) is not int:
            raise ValueError(f"{directory / 'added_tokens.json'}: the id of {text!r} must be a whole number")
        found[number] = AddedToken(text, normalized=text not in special, special=text in special)
    return found


def _named(settings: Mapping[str, Any]) -> Iterator[Any]:
    """The values of bos_token, eos_token and so on, also those that only this model has."""
    for name, value in settings.items():
        if name.endswith(_NAMED) and _text(value):
            yield value
    if isinstance(extra := settings.get(_EXTRA), dict):
        yield from extra.values()


def _extra(settings: Mapping[str, Any]) -> list[Any]:
    found = settings.get(_EXTRA) or settings.get(_EXTRA_OLD) or []
    return [value for value in found if _text(value)] if isinstance(found, list) else []


def _special(value: str | dict[str, Any], by_text: Mapping[str, AddedToken]) -> AddedToken:
    if (text := _text(value)) in by_text:
        return by_text[text]
    if isinstance(value, dict):
        return added_token(value, special=True)
    return AddedToken(text, special=True)


def _text(value: object) -> str:
    """The text of a token that is given as a string or as an object; empty for other values."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
