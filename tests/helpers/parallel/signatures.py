"""Signatures of libraries that are not installed here, as text: `(x, y=..., *, z)`."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from tests.helpers.source import ROOT
from tools.contract_signatures import SIGNATURES

DEVELOPMENT = Path("tests/arch/development_signatures.json")
"""AITER's next release, as far as its public sources were read; by hand, since there is no wheel of it."""


def published() -> dict[str, str]:
    """By dotted name, from the wheels."""
    return _names(SIGNATURES)


def in_development() -> dict[str, str]:
    """By dotted name; only of functions whose sources were read."""
    return _names(DEVELOPMENT)


def _names(path: Path) -> dict[str, str]:
    written: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return {name: text for package in written.values() for name, text in package["names"].items()}


def parsed(text: str) -> inspect.Signature:
    """The signature that `text` writes."""
    definition = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    a = definition.args
    plain = [*a.posonlyargs, *a.args]
    missing = [None] * (len(plain) - len(a.defaults))
    kinds = inspect.Parameter
    parameters = [
        _parameter(each, kinds.POSITIONAL_OR_KEYWORD, default)
        for each, default in zip(plain, [*missing, *a.defaults], strict=True)
    ]
    parameters += [_parameter(a.vararg, kinds.VAR_POSITIONAL)] if a.vararg else []
    keyword_only = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    parameters += [_parameter(each, kinds.KEYWORD_ONLY, default) for each, default in keyword_only]
    parameters += [_parameter(a.kwarg, kinds.VAR_KEYWORD)] if a.kwarg else []
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
    return inspect.Parameter(argument.arg, kind, default=inspect.Parameter.empty if default is None else ...)
