"""The OpenAPI document: all routes, all fields, links that resolve; and the proofs of docs/use/api.md."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from frontend.api.chat.schema import ChatResponse
from frontend.app import _ROUTES
from frontend.openapi import openapi_document
from frontend.openapi.operations import OPERATIONS
from frontend.routes import page, refused, status
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import running_frontend
from tests.unit.frontend.api import test_api_table
from tests.unit.frontend.api.generation import test_kv_transfer
from tests.unit.frontend.api.schemas import test_fields
from tests.unit.frontend.text import test_fim
from tools.api_table import PROOFS, rows

DOCUMENT = openapi_document()


def routes() -> Iterator[tuple[str, str]]:
    """(method, path) of every route of the application that does something."""
    tables = [table for table in _ROUTES if table is not refused.routes]  # those are all 404
    for table in (*tables, page.routes(), status.routes):
        for route in table:
            assert isinstance(route, web.RouteDef)
            yield route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


def test_every_route_is_described_once() -> None:
    described = [(operation.method, operation.path) for operation in OPERATIONS]
    assert sorted(described) == sorted(routes())


def test_references_resolve() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert references <= set(schemas)
    assert {name for name in schemas if name.endswith(("Request", "Response"))} <= references


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.body], ids=lambda each: each.path)
def test_bodies_have_the_fields_that_are_accepted(operation: Any) -> None:
    schema = operation.body
    described = DOCUMENT["components"]["schemas"][schema.struct.__name__]
    assert set(described["properties"]) == {
        *schema.struct.__struct_fields__,
        *schema.harmless,
        *schema.neutral,
    }
    assert described["additionalProperties"] is False
    for name, values in schema.neutral.items():
        assert described["properties"][name]["enum"] == [None, *values]


def test_items_of_lists_are_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    messages = schemas["ChatRequest"]["properties"]["messages"]
    assert "#/components/schemas/Message" in json.dumps(messages)
    assert "reasoning_content" in schemas["Message"]["properties"]
    assert set(schemas["Message"]["properties"]) >= {"audio", "refusal", "tool_calls"}


def test_it_is_served_and_describes_what_is_served(tmp_path: Path) -> None:
    with (
        FakeCore(tmp_path, lambda request: Script([70])) as core,
        running_frontend(core, tiny_tokenizer.checkpoint(tmp_path)) as client,
    ):
        assert client.call("GET", "/openapi.json") == (200, DOCUMENT)
        _, data, _ = client.exchange(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
        )
    msgspec.json.decode(data, type=ChatResponse)


def proven() -> set[str]:
    """The tests of fields that there are, as pytest names them."""
    names = {f"test_fields.py::test_the_model_must_be_the_one_served[{each}]" for each in test_fields.SCHEMAS}
    assert hasattr(test_fim, "test_the_route")
    assert hasattr(test_kv_transfer, "test_a_prompt_is_handed_over")
    names |= {f"test_kv_transfer.py::test_a_prompt_is_handed_over[{each}]" for each in test_kv_transfer.PATHS}
    names.add("test_fim.py::test_the_route")
    for endpoint in test_fields.SCHEMAS:
        without_support = {**test_fields.REFUSED, **test_fields.REFUSED_ONLY[endpoint]}
        for test, fields in (
            ("test_supported_fields_have_an_effect", test_fields.supported(endpoint)),
            ("test_refused_fields_are_named", without_support),
            ("test_harmless_fields_are_accepted", test_fields.HARMLESS),
        ):
            assert hasattr(test_fields, test)
            names |= {f"test_fields.py::{test}[{endpoint}-{name}]" for name in fields}
    for endpoint in test_api_table.SCHEMAS:
        for test, fields in (
            ("test_supported_fields_have_their_effect", test_api_table.TABLE[endpoint]),
            ("test_refused_fields_are_named_and_neutral_values_accepted", test_api_table.REFUSED[endpoint]),
        ):
            assert hasattr(test_api_table, test)
            names |= {f"test_api_table.py::{test}[{endpoint}-{name}]" for name in fields}
        names.add(f"test_api_table.py::test_harmless_fields_change_nothing[{endpoint}]")
    return names


def test_every_field_of_the_documentation_has_its_test() -> None:
    bodies = {operation.path: operation.body for operation in OPERATIONS if operation.body}
    assert set(PROOFS) == set(bodies)
    claimed = {row.test for path, body in bodies.items() if body for row in rows(path, body, DOCUMENT)}
    assert claimed - proven() == set()
