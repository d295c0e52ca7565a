"""The grammar of a schema accepts what a validator accepts, but for the differences that the docs list."""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

from tests.helpers.text.byte_grammars import accepts, compile_bytes
from tests.helpers.text.schema_cases import Schema, mutated, random_instance, random_schema, with_definitions
from workers.grammar.schema_parts import SchemaError

_SCHEMAS = 500
_INSTANCES = 12


def _instances(draw: random.Random, schema: Schema) -> list[Any]:
    probable = [random_instance(draw, schema, schema) for _ in range(_INSTANCES)]
    return [*probable, *(mutated(draw, value) for value in probable)]


def test_grammars_accept_what_a_validator_accepts() -> None:
    counts = {"valid": 0, "invalid": 0, "refused": 0}
    for seed in range(_SCHEMAS):
        draw = random.Random(seed)
        schema = with_definitions(random_schema(draw), draw)
        validator = Draft202012Validator(schema)
        instances = _instances(draw, schema)
        try:
            grammar = compile_bytes("json_schema", json.dumps(schema))
        except SchemaError as error:
            counts["refused"] += 1
            assert "no value fits" in str(error), (seed, schema)
            assert error.path != "#" or not any(map(validator.is_valid, instances)), (seed, schema)
            continue
        for value in instances:
            is_valid = validator.is_valid(value)
            text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            assert accepts(grammar, text) == is_valid, (seed, schema, value)
            counts["valid" if is_valid else "invalid"] += 1
    assert counts["valid"] > 4000 and counts["invalid"] > 4000 and counts["refused"] < 50, counts
