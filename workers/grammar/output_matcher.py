"""Follows outputs by their grammar: first perhaps reasoning, then text of the grammar."""

from collections.abc import Mapping, Sequence
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
        self.matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=grammar.stop_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append these ids to the output."""
        for token_id in token_ids:
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        grammar = self._grammar
        at_start = self._at_start
        self._at_start = False
        if self._in_reasoning:
            self._in_reasoning = token_id != grammar.reasoning_end
        elif at_start and token_id == grammar.reasoning_begin:
            self._in_reasoning = True
        # A terminated matcher takes no id: the core has not seen the end yet, and drops what is sampled.
        elif not (self.failure or self.matcher.is_terminated() or self.matcher.accept_token(token_id)):
            self.failure = (
                "no token that the grammar allows could be sampled: logit_bias, bad_words, "
                "allowed_token_ids or min_tokens exclude all of them"
            )

    @property
    def constrains(self) -> bool:
        """Whether the grammar says which ids may come next; if not, every id may."""
        return not (self._in_reasoning or self.failure or self.matcher.is_terminated())

    @property
    def other_id(self) -> int:
        """An id that may come next besides those of the grammar; -1: none."""
        return self._grammar.reasoning_begin if self._at_start else -1

    def fill_draft_masks(self, drafts: Sequence[int], words_JW: Words) -> None:
        """Write the ids that may come after each of the drafts, from row 1 on; row 0 is the next id's.

        After a draft that the grammar refuses every id may come: none of these samples counts, because no
        sampled id equals that draft. The output is as before.
        """
        words_JW[1:] = ALL_IDS
        if self.failure:
            return
        in_reasoning = self._in_reasoning
        at_start = self._at_start
        accepted = 0
        for place, token_id in enumerate(drafts):
            word, bit = divmod(token_id, WORD_BITS)
            if not words_JW[place].view(np.uint32)[word] >> bit & 1:
                break
            before = self._in_reasoning or self.matcher.is_terminated()
            self._accept(token_id)
            accepted += not (before or (at_start and place == 0 and self._in_reasoning))
            fill_mask(self, words_JW[place + 1])
        if accepted:
            self.matcher.rollback(accepted)
        self._in_reasoning = in_reasoning
        self._at_start = at_start


def fill_mask(matcher: OutputMatcher, words_W: Words) -> None:
    """Write the ids that may come next."""
    if not matcher.constrains:
        words_W[:] = ALL_IDS
        return
    matcher.matcher.fill_next_token_bitmask(words_W[None])
    _allow(matcher.other_id, words_W)


def fill_masks(
    matchers: Mapping[int, OutputMatcher], words_SJW: Words, batch: "xgrammar.BatchGrammarMatcher"
) -> None:
    """Write the ids that may come next, of each slot's matcher, to the slot's row 0."""
    masks_per_slot = words_SJW.shape[1]
    words_SW = words_SJW.reshape(-1, words_SJW.shape[2])
    matchers = {slot * masks_per_slot: matcher for slot, matcher in matchers.items()}
    constrained = {slot: matcher for slot, matcher in matchers.items() if matcher.constrains}
    for slot in matchers.keys() - constrained.keys():
        words_SW[slot] = ALL_IDS
    if constrained:
        each = [matcher.matcher for matcher in constrained.values()]
        batch.batch_fill_next_token_bitmask(each, words_SW, list(constrained))
    for slot, matcher in constrained.items():
        _allow(matcher.other_id, words_SW[slot])


def _allow(token_id: int, words_W: Words) -> None:
    """Allow one more id, unless it is -1."""
    if token_id >= 0:
        word, bit = divmod(token_id, WORD_BITS)
        words_W.view(np.uint32)[word] |= np.uint32(1 << bit)
