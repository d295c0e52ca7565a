"""Compiles one source of a grammar: once to judge it, and again in the process that follows its outputs."""

import os
import re
from typing import TYPE_CHECKING

from atom.shared.messages.codec import encode
from atom.shared.messages.grammar import (
    MAX_GRAMMAR_MEMORY,
    MAX_SOURCE_BYTES,
    CompiledGrammar,
    GrammarSource,
)
from workers.grammar.cost import CostError, token_s
from workers.grammar.json_schema import loaded, prepared, written
from workers.grammar.patterns import full_match
from workers.grammar.schema_parts import Schema, SchemaError
from workers.grammar.structural_tags import ANY_OBJECT, MAX_WHITESPACE, PreparedTag, prepared_tag

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILE_MEMORY = 1 << 30
"""Bytes that a process may allocate to compile a source."""
_MAX_THREADS = 8
_MAX_REASON = 400
_WHERE = re.compile(r"\[[0-9:]+\] \S+?:\d+: ")  # time and place in xgrammar's sources


def compiled(source: GrammarSource, compiler: "xgrammar.GrammarCompiler") -> CompiledGrammar:
    """The compiled grammar, or why the source cannot be used."""
    encoded = encode(source)
    if len(encoded) > MAX_SOURCE_BYTES:
        return _too_large("its text takes", len(encoded), MAX_SOURCE_BYTES)
    try:
        grammar, warnings = compile_source(source, compiler)
    except SchemaError as error:
        return CompiledGrammar(error=_one_line(str(error)))
    except (RuntimeError, ValueError, TypeError) as error:  # xgrammar's own are RuntimeErrors
        return CompiledGrammar(error=_one_line(_WHERE.sub("", str(error))))
    except (MemoryError, RecursionError):
        return CompiledGrammar(error="it is too large or nested too deeply")
    memory = grammar.memory_size_bytes
    if memory > MAX_GRAMMAR_MEMORY:
        return _too_large("compiled it takes", memory, MAX_GRAMMAR_MEMORY)
    try:
        seconds = token_s(grammar)
    except CostError as error:
        return CompiledGrammar(
            error=f"it is too ambiguous: {error}. Let each text be derived in one way: no repetition in a "
            "repetition, no rule that begins with itself, fewer alternatives that begin alike"
        )
    warnings = [_one_line(_WHERE.sub("", text)) for text in warnings]
    return CompiledGrammar(encoded, memory, max(1, round(seconds * 1e6)), warnings=warnings)


def _too_large(what: str, size: int, most: int) -> CompiledGrammar:
    return CompiledGrammar(
        error=f"{what} {size / (1 << 20):.1f} MiB, at most {most >> 20} are possible: use smaller "
        "repetitions, enumerations or length limits"
    )


def make_compiler(info: "xgrammar.TokenizerInfo") -> "xgrammar.GrammarCompiler":
    """Compiles one source. Its cache holds the masks of equal rules, such as those of all strings."""
    import xgrammar

    return xgrammar.GrammarCompiler(info, max_threads=num_threads(), cache_enabled=True)


def num_threads() -> int:
    """Threads that compile a source."""
    return min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))


def compile_source(
    source: GrammarSource, compiler: "xgrammar.GrammarCompiler"
) -> "tuple[xgrammar.CompiledGrammar, list[str]]":
    """(the grammar, what it does not enforce)."""
    match source.kind:
        case "json_schema":
            return _compile_schema(prepared(loaded(source.text)), source, compiler), []
        case "json_object":
            return _compile_schema(ANY_OBJECT, source, compiler), []
        case "regex":
            return compiler.compile_regex(full_match(source.text)), []
        case "grammar":
            return _compile_ebnf(source.text, compiler), []
        case "structural_tag" | "tool_calls":
            tag = prepared_tag(loaded(source.text), of_tools=source.kind == "tool_calls")
            return _compile_tag(tag, compiler), tag.warnings
    raise ValueError(f"there is no grammar of kind {source.kind!r}")


def _compile_ebnf(text: str, compiler: "xgrammar.GrammarCompiler") -> "xgrammar.CompiledGrammar":
    try:
        return compiler.compile_grammar(text)
    except RuntimeError as error:
        reason = _WHERE.sub("", str(error))
        form = 'write EBNF with a rule `root`, as root ::= "yes" | "no"; Lark\'s form is not read'
        raise ValueError(f"{reason} ({form})") from None


def _compile_schema(
    schema: Schema, source: GrammarSource, compiler: "xgrammar.GrammarCompiler"
) -> "xgrammar.CompiledGrammar":
    return compiler.compile_json_schema(
        written(schema), any_whitespace=source.any_whitespace, max_whitespace_cnt=MAX_WHITESPACE
    )


def _compile_tag(tag: PreparedTag, compiler: "xgrammar.GrammarCompiler") -> "xgrammar.CompiledGrammar":
    try:
        return compiler.compile_structural_tag(written(tag.for_xgrammar()))
    except RuntimeError:
        if not tag.relax(_check_schema):
            raise
    return compiler.compile_structural_tag(written(tag.for_xgrammar()))


def _check_schema(schema: Schema) -> None:
    """Raises RuntimeError for a schema that xgrammar refuses."""
    import xgrammar

    xgrammar.Grammar.from_json_schema(written(schema))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]
