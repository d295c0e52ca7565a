"""A compiled grammar is kept once, as long as a request needs it."""

import pytest

from atom.shared.messages.grammar import CompiledGrammar, RowGrammar
from frontend.errors import OverloadedError
from frontend.text.live_grammars import LiveGrammars

COMPILED = CompiledGrammar(bytes(100), 7)


def test_a_grammar_lives_as_long_as_its_requests() -> None:
    live = LiveGrammars()
    first = live.grammar(RowGrammar(b"a", [1]), COMPILED)
    second = live.grammar(RowGrammar(b"a", [2]), COMPILED)
    assert (first.row.stop_ids, second.row.stop_ids, first.memory) == ([1], [2], 7)
    del first
    assert live.source(b"a") is COMPILED.source
    del second
    assert live.source(b"a") is None


def test_their_bytes_are_bounded_and_each_counts_once() -> None:
    live = LiveGrammars(250)
    held = [live.grammar(RowGrammar(b"a", []), COMPILED) for _ in range(10)]
    other = live.grammar(RowGrammar(b"b", []), COMPILED)
    with pytest.raises(OverloadedError, match="take 200 bytes"):
        live.grammar(RowGrammar(b"c", []), COMPILED)
    del other
    held.append(live.grammar(RowGrammar(b"c", []), COMPILED))
