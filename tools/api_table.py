"""The tables of docs/use/api.md: every field of every request body, what happens to it, and its test."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent
from typing import Any

from frontend.api.schemas.fields import Schema
from frontend.openapi import openapi_document
from frontend.openapi.operations import OPERATIONS

_REFERENCE = "#/components/schemas/"


@dataclass(frozen=True)
class Proofs:
    """The tests of one route's fields, as pytest names them."""

    module: str
    endpoint: str
    supported: str
    refused: str
    harmless: str
    others: dict[str, str]
    """Fields with a test of their own, with its module."""

    def of(self, name: str, schema: Schema[Any]) -> str:
        """The test of a field."""
        if name in self.others:
            return self.others[name].format(endpoint=self.endpoint)
        if name in schema.harmless:
            test = self.harmless.format(endpoint=self.endpoint, name=name)
        else:
            kind = self.refused if name in schema.neutral else self.supported
            test = f"{kind}[{self.endpoint}-{name}]"
        return f"{self.module}::{test}"


def _of_openai(endpoint: str) -> Proofs:
    return Proofs(
        "test_fields.py",
        endpoint,
        "test_supported_fields_have_an_effect",
        "test_refused_fields_are_named",
        "test_harmless_fields_are_accepted[{endpoint}-{name}]",
        {
            "model": "test_fields.py::test_the_model_must_be_the_one_served[{endpoint}]",
            "suffix": "test_fim.py::test_the_route",
            "kv_transfer_params": "test_kv_transfer.py::test_a_prompt_is_handed_over[{endpoint}]",
        },
    )


def _of_table(endpoint: str) -> Proofs:
    return Proofs(
        "test_api_table.py",
        endpoint,
        "test_supported_fields_have_their_effect",
        "test_refused_fields_are_named_and_neutral_values_accepted",
        "test_harmless_fields_change_nothing[{endpoint}]",
        {},
    )


PROOFS: dict[str, Proofs] = {
    "/v1/chat/completions": _of_openai("chat"),
    "/v1/completions": _of_openai("completions"),
    "/v1/responses": _of_table("responses"),
    "/v1/responses/input_tokens": _of_table("input_tokens"),
    "/v1/messages": _of_table("messages"),
    "/v1/messages/count_tokens": _of_table("count_tokens"),
    "/tokenize": _of_table("tokenize"),
    "/detokenize": _of_table("detokenize"),
}


@dataclass(frozen=True)
class Row:
    """One field of one route."""

    name: str
    form: str
    what: str
    test: str


def rows(path: str, schema: Schema[Any], document: dict[str, Any]) -> Iterator[Row]:
    """The fields of a body: supported, accepted without effect, refused."""
    proofs = PROOFS[path]
    texts = dict(_docstrings(schema.struct))
    properties = document["components"]["schemas"][schema.struct.__name__]["properties"]
    for name in schema.struct.__struct_fields__:
        what = " ".join(["honoured", *([f"({texts[name]})"] if name in texts else [])])
        yield Row(name, _form(properties[name]), what, proofs.of(name, schema))
    for name in sorted(schema.harmless):
        yield Row(name, "any", "neutral: accepted, changes nothing", proofs.of(name, schema))
    for name, values in sorted(schema.neutral.items()):
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in (None, *values))
        yield Row(name, "", f"refused by name; accepted: {accepted}", proofs.of(name, schema))


def api_tables() -> str:
    """A table for each route with a body."""
    document = openapi_document()
    parts: list[str] = []
    for operation in OPERATIONS:
        if operation.body is None:
            continue
        parts += [f"### {operation.method.upper()} {operation.path}", ""]
        parts += ["| field | type | what happens | test |", "|---|---|---|---|"]
        for row in rows(operation.path, operation.body, document):
            cells = [f"`{row.name}`", row.form, row.what, f"`{row.test}`"]
            parts.append("| " + " | ".join(cell(text) for text in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def route_table() -> str:
    """One row for each route and method."""
    lines = ["| route | | statuses besides 200 |", "|---|---|---|"]
    for operation in OPERATIONS:
        statuses = ", ".join(
            map(str, sorted({400, *([401] if operation.needs_key else []), *operation.errors}))
        )
        lines.append(f"| `{operation.method.upper()} {operation.path}` | {operation.summary} | {statuses} |")
    return "\n".join(lines)


def _docstrings(struct: type) -> Iterator[tuple[str, str]]:
    """Name and docstring of each field, of bases first: Python keeps them in the source alone."""
    for kind in reversed(struct.__mro__):
        if not kind.__module__.startswith("frontend."):
            continue
        (declaration,) = ast.parse(dedent(inspect.getsource(kind))).body
        assert isinstance(declaration, ast.ClassDef)
        for statement, following in pairwise(declaration.body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                yield statement.target.id, inspect.cleandoc(str(following.value.value)).rstrip(".")


def _form(schema: dict[str, Any]) -> str:
    """The JSON type of a field, without null."""
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        forms = dict.fromkeys(_form(part) for part in schema["anyOf"] if part.get("type") != "null")
        return " or ".join(forms)
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"] if value is not None)
    if schema.get("type") == "array":
        return f"list of {_form(schema.get('items', {}))}"
    return str(schema.get("type", "object"))


def cell(text: str) -> str:
    """A text as one line of a Markdown table's cell."""
    return " ".join(text.split()).replace("|", "\\|")
