"""Vocabularies of byte pairs, against the definition: join the pair with the lowest rank."""

import base64
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from workers.checkpoint.byte_pairs import KIMI_PATTERN, tekken_tokenizer, tiktoken_tokenizer

TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "the cat's hat is in the that 中文 中文字 Don't SAY 2026 Ärger  e\u0301e\u0301\n\n  then\r\n"
KIMI: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer"}
NAMED = {0: "[BOS]", 1: "[EOS]", 7: "<|im_end|>"}
"""By their distance from the end of the vocabulary."""


def vocabulary() -> dict[bytes, int]:
    """All bytes, and pairs that are joined again and again, as a trainer would."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    parts = [bytes([byte]) for byte in TEXT.encode()]
    while len(ranks) < 290:
        pairs = [(a, b) for a, b in itertools.pairwise(parts) if a + b not in ranks]
        left, right = max(set(pairs), key=lambda pair: (pairs.count(pair), pair))
        ranks[left + right] = len(ranks)
        parts = _joined(parts, left, right)
    return ranks


def _joined(parts: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    made: list[bytes] = []
    for part in parts:
        if part == right and made and made[-1] == left:
            made[-1] = left + right
        else:
            made.append(part)
    return made


RANKS = vocabulary()


def by_definition(text: str, pattern: str) -> list[int]:
    return [i for piece in regex.findall(pattern, text, regex.V1) for i in _ids(piece.encode())]


def _ids(piece: bytes) -> list[int]:
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        ranked = [RANKS.get(a + b, len(RANKS)) for a, b in itertools.pairwise(parts)]
        if not ranked or min(ranked) == len(RANKS):
            return [RANKS[part] for part in parts]
        at = ranked.index(min(ranked))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def texts() -> Iterator[str]:
    chance = random.Random(3)
    pieces = [
        *TEXT.split(" "),
        " ",
        "  ",
        "\n",
        "\t ",
        "\r\n",
        "'ll",
        "'S",
        "12345",
        "漢",
        "한글",
        "😀",
        "ǅ",
        "́",
    ]
    yield TEXT
    for _ in range(400):
        yield "".join(chance.choice(pieces) for _ in range(chance.randrange(1, 12)))


def kimi(directory: Path, config: dict[str, Any], ranks: dict[bytes, int] = RANKS) -> Tokenizer:
    path = directory / "tiktoken.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items()))
    return Tokenizer.from_str(tiktoken_tokenizer(path, config))


def tekken(directory: Path, special: list[str] | None = None) -> Tokenizer:
    path = directory / "tekken.json"
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    config = {
        "pattern": TEKKEN_PATTERN,
        "default_vocab_size": len(RANKS) + 24,
        "default_num_special_tokens": 24,
    }
    content = {"config": config, "vocab": [*vocab, {"rank": len(RANKS), "token_bytes": "fn4="}]}
    if special:
        content["special_tokens"] = [{"rank": i, "token_str": text} for i, text in enumerate(special)]
    path.write_text(json.dumps(content))
    return Tokenizer.from_str(tekken_tokenizer(path))


def test_ids_are_those_of_the_definition(tmp_path: Path) -> None:
    one = kimi(tmp_path, KIMI)
    other = tekken(tmp_path)
    for text in texts():
        ids = one.encode(text).ids
        assert ids == by_definition(text, KIMI_PATTERN), text
        assert one.decode(ids) == text
        wanted = [1, *(24 + i for i in by_definition(text, TEKKEN_PATTERN))]
        assert other.encode(text).ids == wanted, text


def test_special_tokens_of_kimi_follow_the_vocabulary(tmp_path: Path) -> None:
    first = len(RANKS)
    config = KIMI | {
        "added_tokens_decoder": {
            str(first + i): {"content": text, "special": i < 2, "normalized": False}
            for i, text in NAMED.items()
        }
    }
    made = kimi(tmp_path, config)
    text = f"the[BOS]cat<|im_end|>[EOS]<|reserved_token_{first + 9}|>"
    ids = [i for i in made.encode(text).ids if i >= first]
    assert ids == [first, first + 7, first + 1, first + 9]
    assert made.get_vocab_size() == first + 256
    assert made.decode(ids) == "<|im_end|>"


def test_special_tokens_of_tekken_precede_the_vocabulary(tmp_path: Path) -> None:
    made = tekken(tmp_path)
    assert made.encode("<s>[INST]the[/INST]</s>").ids == [1, 1, 3, 24 + RANKS[b"the"], 4, 2]
    assert made.id_to_token(23) == "<SPECIAL_23>" and made.get_vocab_size() == len(RANKS) + 24
    own = tekken(tmp_path, ["<unk>", "<s>", "</s>", "[THINK]"])
    assert own.token_to_id("[THINK]") == 3 and own.id_to_token(4) == "<SPECIAL_4>"


def test_files_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names QwenTokenizer: save the tokenizer as"):
        kimi(tmp_path, {"tokenizer_class": "QwenTokenizer"})
    with pytest.raises(ValueError, match="not a whole vocabulary"):
        kimi(tmp_path, KIMI, {b"a": 3})
    with pytest.raises(ValueError, match="'a' is both a special token and in the vocabulary"):
        kimi(tmp_path, KIMI | {"added_tokens_decoder": {str(len(RANKS)): {"content": "a"}}})
    for config, words in (({"added_tokens_decoder": ["a"]}, "must map ids"), ({}, "line 1: no token")):
        (tmp_path / "tiktoken.model").write_text("%%% 1\n")
        with pytest.raises(ValueError, match="line 1"):
            tiktoken_tokenizer(tmp_path / "tiktoken.model", KIMI)
        if config:
            with pytest.raises(ValueError, match=words):
                kimi(tmp_path, KIMI | config)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tekken\.json is not a tekken\.json: KeyError"):
        tekken_tokenizer(tmp_path / "tekken.json")
