"""Grammars over a vocabulary of single bytes."""

import functools

import xgrammar

from atom.shared.messages.grammar import GrammarSource
from workers.grammar.compiling import compile_source

_END = 256


@functools.cache
def byte_compiler() -> xgrammar.GrammarCompiler:
    """Compiles for a vocabulary of all bytes and an end-of-sequence token."""
    vocabulary = [*(bytes([byte]) for byte in range(_END)), b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[_END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile_bytes(kind: str, text: str) -> xgrammar.CompiledGrammar:
    """The grammar of a source. Raises what `compile_source` does."""
    return compile_source(GrammarSource(kind, text), byte_compiler())[0]


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(_END)
