"""Random prompts of an exact length."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from atom.benchmarks.serving.tokenizer import PromptTokenizer

__all__ = ["Ids", "exact_texts", "random_ids", "stable_tokens"]

Ids = list[int]
_ROUNDS = 10
_CANDIDATES = 8192


def random_ids(
    rng: np.random.Generator, tokens: NDArray[np.int64], lengths: Iterable[int], prefix_len: int = 0
) -> list[Ids]:
    """Lists of random ids from `tokens`, each after one common prefix of `prefix_len` ids.

    All ids are independent, so that prompts have no longer prefix in common.
    """
    prefix = rng.choice(tokens, prefix_len).tolist()
    return [prefix + rng.choice(tokens, length).tolist() for length in lengths]


def stable_tokens(tokenizer: PromptTokenizer, rng: np.random.Generator) -> NDArray[np.int64]:
    """Ids whose text tokenizes to the same single id, from a random subset of the vocabulary.

    Special tokens and parts of characters are excluded.
    """
    tried = rng.permutation(tokenizer.vocab_size)[:_CANDIDATES]
    singles = [[token] for token in tried.tolist() if token not in tokenizer.special_ids]
    read_back = tokenizer.encode_all(tokenizer.decode_all(singles))
    stable = [token[0] for token, back in zip(singles, read_back, strict=True) if back == token]
    return np.array(stable or [token[0] for token in singles], dtype=np.int64)


def exact_texts(
    tokenizer: PromptTokenizer,
    ids: list[Ids],
    tokens: NDArray[np.int64],
    rng: np.random.Generator,
    wrap: Callable[[str], str] = str,
) -> tuple[list[str], list[int]]:
    """`wrap` applied to the text of each list of ids, and the lengths in tokens of the results.

    A result shall have as many tokens as its ids. Tokenizing may merge neighbours, and `wrap` adds
    tokens, so ids are appended or removed until the length is right. The few texts that still have
    another length after some rounds are kept.
    """
    wanted = [len(one) for one in ids]
    bodies = list(ids)
    texts = [""] * len(ids)
    lengths = [0] * len(ids)
    remaining = list(range(len(ids)))
    for _ in range(_ROUNDS):
        plain = tokenizer.decode_all([bodies[i] for i in remaining])
        wrapped = [wrap(text) for text in plain]
        for i, text, found in zip(remaining, wrapped, tokenizer.encode_all(wrapped), strict=True):
            texts[i] = text
            lengths[i] = len(found)
        remaining = [i for i in remaining if lengths[i] != wanted[i]]
        if not remaining:
            break
        for i in remaining:
            bodies[i] = _corrected(bodies[i], wanted[i] - lengths[i], tokens, rng)
    return texts, lengths


def _corrected(body: Ids, missing: int, tokens: NDArray[np.int64], rng: np.random.Generator) -> Ids:
    if missing > 0:
        return [*body, *rng.choice(tokens, missing).tolist()]
    return body[: len(body) + missing] if len(body) + missing > 0 else body[:1]
