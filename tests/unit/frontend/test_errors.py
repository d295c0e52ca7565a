"""Errors, and the names of fields in them."""

import pytest

from frontend.errors import RequestError

NAMES = {
    "stop": "stop_sequences",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


@pytest.mark.parametrize(
    ("field", "message", "renamed"),
    [
        ("stop", "'stop' has 9 strings that stop", "'stop_sequences' has 9 strings that stop"),
        (
            "max_tokens",
            "max_tokens is 0: raise max_tokens",
            "max_output_tokens is 0: raise max_output_tokens",
        ),
        ("n", "'n' is 0, as 'stop' is", "'n' is 0, as 'stop' is"),
        (None, "'stop' is no field here", "'stop' is no field here"),
    ],
)
def test_the_field_at_fault_has_the_name_of_its_endpoint(
    field: str | None, message: str, renamed: str
) -> None:
    error = RequestError(message, field)
    error.rename_field(NAMES)
    assert error.message == renamed
    assert error.param == NAMES.get(field or "", field)


@pytest.mark.parametrize(
    ("field", "renamed"),
    [
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format.type", "text.format.type"),
        ("tools.stop", "tools.stop"),
    ],
)
def test_the_name_of_an_endpoint_holds_for_what_is_in_its_field(field: str, renamed: str) -> None:
    error = RequestError(f"'{field}' is missing", field)
    error.rename_field(NAMES)
    assert (error.message, error.param) == (f"'{renamed}' is missing", renamed)
