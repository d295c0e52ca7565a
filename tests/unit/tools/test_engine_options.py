"""The committed options of LLMEngine are the fields of the configuration, with their types."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from atom.engine.engine_options import EngineOptions
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import Field, fields_of
from tools.engine_options import MODULE, module_text

FIELDS = [
    field
    for concern in fields(EngineConfig)
    for field in fields_of(concern.default_factory)
    if field.name != "model"
]
HINTS = get_type_hints(EngineOptions)


def accepts(hint: Any, value: object) -> bool:
    try:
        return bool(msgspec.convert(value, hint) == value)
    except msgspec.ValidationError:
        return False


def test_the_module_is_up_to_date() -> None:
    assert MODULE.read_text(encoding="utf-8") == module_text(), "run `make docs`"


def test_names_are_those_of_the_fields_in_their_order() -> None:
    assert list(EngineOptions.__annotations__) == [field.name for field in FIELDS]
    assert not EngineOptions.__required_keys__


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_type_accepts_what_the_field_accepts(field: Field) -> None:
    kinds = [kind for kind in get_args(HINTS[field.name]) or [HINTS[field.name]] if kind is not type(None)]
    hint = HINTS[field.name]
    assert (type(None) in get_args(hint)) is field.optional
    if field.choices:
        literal = hint if get_origin(hint) is Literal else kinds[0]
        assert get_args(literal) == field.choices
    else:
        assert field.kind in kinds
        assert accepts(field.kind, field.default) or field.optional
