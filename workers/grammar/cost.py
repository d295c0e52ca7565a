"""What a compiled grammar costs in steps, judged before any request may use it.

xgrammar's work for a token depends on how ambiguous the grammar is, and has no bound. So some outputs are
tried with the model's vocabulary: those with the longest tokens, random ones, and the same token again and
again. An honest grammar takes less than a millisecond for most tokens, and tens of them near the end of a
string with a greatest length, where each long token must be tried.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workers.grammar.output_matcher import WORD_BITS

if TYPE_CHECKING:
    import xgrammar

MAX_TOKEN_S = 0.1
"""Most CPU time for one token: to accept it, and to find those that may follow."""
_MAX_TOTAL_S = 4.0
_MAX_TOKENS = 64
_RANDOM_OUTPUTS = 2
_SEED = 0

Ids = NDArray[np.int64]
_Pick = Callable[[Ids], int]


class CostError(ValueError):
    """A grammar that costs too much; the text is for the client."""


def token_s(compiled: "xgrammar.CompiledGrammar") -> float:
    """CPU seconds that a token takes: the mean of the tried output that takes longest. Raises CostError."""
    info = compiled.tokenizer_info
    lengths = np.array([len(token) for token in info.decoded_vocab])
    random = np.random.default_rng(_SEED)
    picks: list[_Pick] = [
        lambda ids: int(ids[lengths[ids].argmax()]),
        *[lambda ids: int(random.choice(ids))] * _RANDOM_OUTPUTS,
        _repeated(random),
    ]
    outputs: list[list[float]] = []
    left_s = _MAX_TOTAL_S
    for pick in picks:
        taken = _try_output(compiled, info.vocab_size, pick, left_s)
        outputs.append(taken)
        left_s -= sum(taken)
        if max(taken) > MAX_TOKEN_S:
            milliseconds = max(taken) * 1000
            most = MAX_TOKEN_S * 1000
            raise CostError(
                f"a token takes {milliseconds:.0f} ms of CPU time, at most {most:.0f} are possible"
            )
        if left_s < 0:
            raise CostError(
                f"{sum(map(len, outputs))} tokens take more than {_MAX_TOTAL_S:.0f} s of CPU time"
            )
    return max(sum(taken) / len(taken) for taken in outputs)


def _repeated(random: np.random.Generator) -> _Pick:
    """Picks a random id, and the same one again as long as it may follow."""
    last = -1

    def pick(ids: Ids) -> int:
        nonlocal last
        if last not in ids:
            last = int(random.choice(ids))
        return last

    return pick


def _try_output(
    compiled: "xgrammar.CompiledGrammar", vocab_size: int, pick: _Pick, left_s: float
) -> list[float]:
    """CPU seconds for each token of an output, until it ends or takes too long; at least one number."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    words_1W = np.zeros((1, -(-vocab_size // WORD_BITS)), np.int32)
    taken = []
    for _ in range(_MAX_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(words_1W, 0)
        filled = time.thread_time()
        ids = np.flatnonzero(np.unpackbits(words_1W.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(ids):
            taken.append(filled - started)
            break
        token_id = pick(ids)
        accepting = time.thread_time()
        matcher.accept_token(token_id)
        taken.append(filled - started + time.thread_time() - accepting)
        if taken[-1] > MAX_TOKEN_S or sum(taken) > left_s or matcher.is_terminated():
            break
    return taken
