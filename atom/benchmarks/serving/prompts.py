"""Random prompts of an exact length."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from atom.benchmarks.serving.tokenizer import PromptTokenizer

__all__ = ["Ids", "exact_texts", "random_ids", "steady_tokens"]

Ids = list[int]
_ROUNDS = 10
_CANDIDATES = 8192


def random_ids(
    source: np.random.Generator, tokens: NDArray[np.int64], lengths: Iterable[int], prefix_len: int = 0
) -> list[Ids]:
    """Lists of ids drawn from `tokens`, each behind one common prefix of `prefix_len` ids.

    Every place is drawn by itself, so that prompts share no beginning but the prefix.
    """
    prefix = source.choice(tokens, prefix_len).tolist()
    return [prefix + source.choice(tokens, length).tolist() for length in lengths]


def steady_tokens(tokenizer: PromptTokenizer, source: np.random.Generator) -> NDArray[np.int64]:
    """Ids whose text is read back as the same single id, out of some thousands tried.

    Parts of characters and special tokens are not among them.
    """
    tried = source.permutation(tokenizer.vocab_size)[:_CANDIDATES]
    singles = [[token] for token in tried.tolist() if token not in tokenizer.special_ids]
    read_back = tokenizer.encode_all(tokenizer.decode_all(singles))
    steady = [token[0] for token, back in zip(singles, read_back, strict=True) if back == token]
    return np.array(steady or [token[0] for token in singles], dtype=np.int64)


def exact_texts(
    tokenizer: PromptTokenizer,
    ids: list[Ids],
    tokens: NDArray[np.int64],
    source: np.random.Generator,
    wrap: Callable[[str], str] = str,
) -> tuple[list[str], list[int]]:
    """Texts that `wrap` makes of the ids' text, and their lengths: as many tokens as the ids were.

    Neighbours may merge when text is read back, and `wrap` adds a frame. So a text that came out
    too short gets further tokens, one that is too long loses its last ones, until it fits; the
    few that never do keep the length that they have.
    """
    wanted = [len(one) for one in ids]
    bodies = list(ids)
    texts = [""] * len(ids)
    lengths = [0] * len(ids)
    open_places = list(range(len(ids)))
    for _ in range(_ROUNDS):
        plain = tokenizer.decode_all([bodies[i] for i in open_places])
        wrapped = [wrap(text) for text in plain]
        for i, text, found in zip(open_places, wrapped, tokenizer.encode_all(wrapped), strict=True):
            texts[i], lengths[i] = text, len(found)
        open_places = [i for i in open_places if lengths[i] != wanted[i]]
        if not open_places:
            break
        for i in open_places:
            bodies[i] = _corrected(bodies[i], wanted[i] - lengths[i], tokens, source)
    return texts, lengths


def _corrected(body: Ids, missing: int, tokens: NDArray[np.int64], source: np.random.Generator) -> Ids:
    if missing > 0:
        return [*body, *source.choice(tokens, missing).tolist()]
    return body[: len(body) + missing] if len(body) + missing > 0 else body[:1]
