"""The grammars of the rows of the persistent batch: which ids each of them may sample next.

A row's matcher follows its output. To mask the logits of step n + 1 it needs the id of step n: that is
copied to the host after step n, while the forward pass of n + 1 runs, so only the sampler waits for it.
With tensor parallelism every rank follows the same ids, and masks alike.

G rows with a grammar, W words of 32 ids each.
"""

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.grammar import RowGrammar
from atom.shared.messages.worker import NewRow
from workers.grammar.library import GrammarLibrary

Words = NDArray[np.int32]

_WORD_BITS = 32
_ALL = -1  # a word of ones
_SLOW_S = 0.05


class RowMatcher:
    """Follows one row's output: first perhaps reasoning, then text of the grammar."""

    def __init__(self, library: GrammarLibrary, grammar: RowGrammar, output: Sequence[int]):
        """`output` has been generated already. Raises KeyError for a grammar that is not loaded."""
        self._grammar = grammar
        self._in_reasoning = grammar.in_reasoning
        self._at_start = True
        self.failure = ""
        """Why the row cannot go on."""
        self._is_lost = False
        """Whether the output is no text of the grammar: its masks allow every id."""
        self._matcher = library.matcher(grammar.key, grammar.stop_ids)
        for token_id in output:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """The row has sampled this id."""
        grammar = self._grammar
        at_start = self._at_start
        self._at_start = False
        if self._in_reasoning:
            self._in_reasoning = token_id != grammar.reasoning_end
        elif at_start and token_id == grammar.reasoning_begin:
            self._in_reasoning = True
        # A terminated matcher takes no id: the core has not seen the end yet, and drops what is sampled.
        elif not (self._is_lost or self._matcher.is_terminated() or self._matcher.accept_token(token_id)):
            self._is_lost = True
            self.failure = (
                "no token that the grammar allows could be sampled: logit_bias, bad_words, "
                "allowed_token_ids or min_tokens exclude all of them"
            )

    def fill(self, words_GW: Words, index: int) -> None:
        """Write the ids that may come next."""
        if self._in_reasoning or self._is_lost or self._matcher.is_terminated():
            words_GW[index] = _ALL
            return
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(words_GW, index)
        if time.thread_time() - started > _SLOW_S and not self.failure:
            # The ranks do not agree on times: until the core ends the row, its masks stay right.
            self.failure = "the grammar is too ambiguous: finding the next token takes too long"
        if self._at_start and self._grammar.reasoning_begin >= 0:
            word, bit = divmod(self._grammar.reasoning_begin, _WORD_BITS)
            words_GW[index].view(np.uint32)[word] |= np.uint32(1 << bit)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Ids on their way to the host."""

    matchers: list[RowMatcher]
    ids_G: torch.Tensor
    copied: "torch.cuda.Event | None"
    """Event after the copy; None: the ids are on the host."""


class RowMatchers:
    """The matchers of all rows, in steps: `masks`, sample, `record`."""

    def __init__(self, library: GrammarLibrary | None, vocab_size: int, device: torch.device):
        self._library = library
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._device = device
        self._matchers: dict[int, RowMatcher] = {}
        self._sampled: _Sampled | None = None

    @property
    def rows(self) -> Set[int]:
        """The rows with a grammar."""
        return self._matchers.keys()

    def set_row(self, new: NewRow) -> None:
        """Set or remove the grammar of a row that is assigned to a new request."""
        self._matchers.pop(new.row, None)
        if new.grammar is None:
            return
        assert self._library is not None, "a row has a grammar, and the sampler no library"
        output = np.frombuffer(new.output_ids, np.dtype("<i4")).tolist()
        self._matchers[new.row] = RowMatcher(self._library, new.grammar, output)

    def masks(self, rows: Sequence[int]) -> torch.Tensor:
        """The ids that these rows may sample, int32 [G, W] on the device: a bit for each id, 1 if it may."""
        self._settle()
        words_GW = np.empty((len(rows), self._num_words), np.int32)
        for index, row in enumerate(rows):
            self._matchers[row].fill(words_GW, index)
        mask_GW = torch.from_numpy(words_GW)
        if self._device.type == "cpu":
            return mask_GW
        return mask_GW.pin_memory().to(self._device, non_blocking=True)

    def failures(self, rows: Sequence[int]) -> dict[int, str]:
        """Why some of these rows cannot go on, by row."""
        return {row: reason for row in rows if (reason := self._matchers[row].failure)}

    def record(self, rows: Sequence[int], ids_G: torch.Tensor) -> None:
        """These rows have sampled these ids (int64)."""
        matchers = [self._matchers[row] for row in rows]
        if not ids_G.is_cuda:
            self._sampled = _Sampled(matchers, ids_G, None)
            return
        host_G = torch.empty(ids_G.shape, dtype=ids_G.dtype, pin_memory=True)
        host_G.copy_(ids_G, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._sampled = _Sampled(matchers, host_G, copied)

    def _settle(self) -> None:
        """Follow the ids of the last step."""
        sampled = self._sampled
        self._sampled = None
        if sampled is None:
            return
        if sampled.copied is not None:
            sampled.copied.synchronize()
        for matcher, token_id in zip(sampled.matchers, sampled.ids_G.tolist(), strict=True):
            matcher.accept(token_id)
