"""The grammar of a schema accepts what a validator accepts, but for the differences that the docs list."""

import json
import random
from typing import Any

import jsonschema
import pytest
import xgrammar

from atom.shared.messages.grammar import GrammarSource
from tests.helpers.schema_cases import Schema, mutated, random_instance, random_schema, with_definitions
from workers.grammar.compiling import compile_source
from workers.grammar.schema_parts import SchemaError

_INSTANCES = 12


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """Of a vocabulary of single bytes."""
    vocabulary = [*(bytes([byte]) for byte in range(256)), b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _accepts(grammar: xgrammar.CompiledGrammar, value: Any) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return matcher.accept_string(text) and matcher.accept_token(256)


def _instances(draw: random.Random, schema: Schema) -> list[Any]:
    probable = [random_instance(draw, schema, schema) for _ in range(_INSTANCES)]
    return [*probable, *(mutated(draw, value) for value in probable)]


def _compare(compiler: xgrammar.GrammarCompiler, seeds: range) -> dict[str, int]:
    """Numbers of accepted and excluded instances, and of refused schemas."""
    counts = {"valid": 0, "invalid": 0, "refused": 0}
    for seed in seeds:
        draw = random.Random(seed)
        schema = with_definitions(random_schema(draw), draw)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            grammar, _ = compile_source(GrammarSource("json_schema", json.dumps(schema)), compiler)
        except SchemaError:
            counts["refused"] += 1
            continue
        for value in _instances(draw, schema):
            is_valid = validator.is_valid(value)
            assert _accepts(grammar, value) == is_valid, (seed, schema, value)
            counts["valid" if is_valid else "invalid"] += 1
    return counts


def test_grammars_accept_what_a_validator_accepts(compiler: xgrammar.GrammarCompiler) -> None:
    counts = _compare(compiler, range(500))
    assert counts["valid"] > 2000 and counts["invalid"] > 2000 and counts["refused"] < 50, counts
