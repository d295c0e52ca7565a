"""Follows one output by its grammar: first perhaps reasoning, then text of the grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atom.shared.messages.grammar import RowGrammar

if TYPE_CHECKING:
    import xgrammar

Words = NDArray[np.int32]
"""A bit for each id, 32 in a word: 1 if the id may come next."""

WORD_BITS = 32
ALL_IDS = -1
"""A word of ones."""


class OutputMatcher:
    """Which ids may come next in one output."""

    failure = ""
    """Why the output cannot go on."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", grammar: RowGrammar):
        import xgrammar

        self._grammar = grammar
        self._in_reasoning = grammar.in_reasoning
        self._at_start = True
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=grammar.stop_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these ids."""
        for token_id in token_ids:
            self._accept(token_id)

    def fill(self, words_GW: Words, index: int) -> None:
        """Write the ids that may come next to row `index`: every id where the grammar says nothing."""
        if self._in_reasoning or self.failure or self._matcher.is_terminated():
            words_GW[index] = ALL_IDS
            return
        self._matcher.fill_next_token_bitmask(words_GW, index)
        if self._at_start and self._grammar.reasoning_begin >= 0:
            word, bit = divmod(self._grammar.reasoning_begin, WORD_BITS)
            words_GW[index].view(np.uint32)[word] |= np.uint32(1 << bit)

    def _accept(self, token_id: int) -> None:
        grammar = self._grammar
        at_start = self._at_start
        self._at_start = False
        if self._in_reasoning:
            self._in_reasoning = token_id != grammar.reasoning_end
        elif at_start and token_id == grammar.reasoning_begin:
            self._in_reasoning = True
        # A terminated matcher takes no id: the core has not seen the end yet, and drops what is sampled.
        elif not (self.failure or self._matcher.is_terminated() or self._matcher.accept_token(token_id)):
            self.failure = (
                "no token that the grammar allows could be sampled: logit_bias, bad_words, "
                "allowed_token_ids or min_tokens exclude all of them"
            )
