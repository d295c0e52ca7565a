"""Masks after drafts are those that the output has when it gets there; the output itself is as before."""

import random
from pathlib import Path

import numpy as np
import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.grammar import RowGrammar
from tests.helpers.checkpoints import tiny_tokenizer
from workers.grammar.output_matcher import OutputMatcher, fill_masks
from workers.grammar.vocabulary import tokenizer_info

EOS = 1
THINK = 2
END_THINK = 3
DRAFTS = 4
PATTERN = r'\{"(name|next)": ("[a-c]{1,3}"|true|null)(, "id": [0-9]{2})?\}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory: Path = tmp_path_factory.mktemp("model")
    return tiny_tokenizer.checkpoint(directory, tags=("<think>", "</think>"))


def ids_of(words_W: np.ndarray) -> list[int]:
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_masks_after_drafts_are_those_of_the_output(checkpoint: Checkpoint, in_reasoning: bool) -> None:
    import xgrammar

    draw = random.Random(4)
    compiler = xgrammar.GrammarCompiler(tokenizer_info(checkpoint), max_threads=1, cache_enabled=False)
    compiled = compiler.compile_regex(PATTERN)
    batch = xgrammar.BatchGrammarMatcher(max_threads=1)
    grammar = RowGrammar(b"", [EOS], in_reasoning, THINK, END_THINK)
    num_words = -(-checkpoint.vocab_size // 32)
    refused = accepted = 0
    for _ in range(30):
        made = OutputMatcher(compiled, grammar)
        slow = OutputMatcher(compiled, grammar)
        words = np.zeros((1, 1 + DRAFTS, num_words), np.int32)
        expected = np.zeros((1, 1, num_words), np.int32)
        for _ in range(60):
            fill_masks({0: made}, words, batch)
            here = ids_of(words[0, 0])
            drafts = [draw.choice(here if draw.random() < 0.7 else range(checkpoint.vocab_size))]
            drafts += [draw.randrange(checkpoint.vocab_size) for _ in range(DRAFTS - 1)]
            if END_THINK in here and draw.random() < 0.3:
                drafts[0] = END_THINK
            made.fill_draft_masks(drafts, words[0])
            for place in range(1 + DRAFTS):
                fill_masks({0: slow}, expected, batch)
                assert ids_of(words[0, place]) == ids_of(expected[0, 0])
                allowed = ids_of(words[0, place])
                if place == DRAFTS or drafts[place] not in allowed:
                    refused += 1
                    sampled = draw.choice(allowed)
                    slow.accept([sampled])
                    break
                accepted += 1
                slow.accept([drafts[place]])
            made.accept([*drafts[:place], sampled])
    assert refused > 100
    assert accepted > 100
