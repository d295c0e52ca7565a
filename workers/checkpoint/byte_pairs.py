"""Converts vocabularies of byte pairs that state ranks and no merges: tiktoken.model and tekken.json.

    tiktoken.model   a line for each token: its bytes in Base64, its rank
    tekken.json      {"config": {"pattern": …}, "vocab": [{"rank": …, "token_bytes": …}, …],
                      "special_tokens": [{"rank": …, "token_str": …}, …]}

The result joins the pair whose bytes have the lowest rank, as these do: a merge for each way to split a
token in two, in the order of ranks.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from workers.checkpoint.added_tokens import stated_by_id
from workers.checkpoint.hf_config import read_json

__all__ = ["KIMI_PATTERN", "TEKKEN", "TIKTOKEN", "tekken_tokenizer", "tekken_tokens", "tiktoken_tokenizer"]

TIKTOKEN = "tiktoken.model"
TEKKEN = "tekken.json"

# The pattern is in the Python code of such checkpoints, which is not run: only this class is known.
_KIMI = "TikTokenTokenizer"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_KIMI_RESERVED = 256
"""Ids after the vocabulary: special tokens, whether they are named or not."""

_TEKKEN_BOS = "<s>"
_TEKKEN_EOS = "</s>"
_TEKKEN_FILLER = "<SPECIAL_{}>"
# The special tokens of files that do not list them.
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def tiktoken_tokenizer(path: Path, config: Mapping[str, Any]) -> str:
    """The tokenizer.json of a Kimi checkpoint; `config` is tokenizer_config.json. Raises ValueError."""
    if (name := config.get("tokenizer_class")) != _KIMI:
        raise ValueError(
            f"{path} can be converted for the tokenizer_class {_KIMI} (Kimi, Moonlight) only, and "
            f"tokenizer_config.json names {name}: save the tokenizer as tokenizer.json"
        )
    ranks = _ranks_of_lines(path)
    first = len(ranks)
    named = stated_by_id(config, path.parent)
    stop = max([first + _KIMI_RESERVED, *(number + 1 for number in named)])
    tokens = {
        number: named.get(number) or _special(f"<|reserved_token_{number}|>") for number in range(first, stop)
    }
    return _tokenizer(ranks, KIMI_PATTERN, tokens, path).to_str()


def tekken_tokenizer(path: Path) -> str:
    """The tokenizer.json of a tekken.json; it adds the token <s> at the beginning. Raises ValueError."""
    content = read_json(path)
    try:
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - num_special
        entries = {entry["rank"]: base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]}
        texts = [
            entry["token_str"] for entry in sorted(_listed_tokens(content), key=lambda e: int(e["rank"]))
        ]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a tekken.json: {type(error).__name__}: {error}") from None
    texts += [_TEKKEN_FILLER.format(number) for number in range(len(texts), num_special)]
    ranks = {token: num_special + rank for rank, token in sorted(entries.items()) if rank < size}
    made = _tokenizer(ranks, pattern, dict(enumerate(map(_special, texts))), path)
    bos = made.token_to_id(_TEKKEN_BOS)
    made.post_processor = processors.TemplateProcessing(
        single=f"{_TEKKEN_BOS} $A", pair=None, special_tokens=[(_TEKKEN_BOS, bos)]
    )
    return made.to_str()


def tekken_tokens() -> dict[str, str]:
    """The special tokens by their names in templates, which tekken.json does not state."""
    return {"bos_token": _TEKKEN_BOS, "eos_token": _TEKKEN_EOS}


def _listed_tokens(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = content.get("special_tokens") or []
    return listed or [{"rank": i, "token_str": text} for i, text in enumerate(_TEKKEN_SPECIAL)]


def _ranks_of_lines(path: Path) -> dict[bytes, int]:
    """The rank of each token, from 0 without gaps."""
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        try:
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(f"{path}, line {number}: no token in Base64 and its rank") from None
    if sorted(found.values()) != list(range(len(found))):
        raise ValueError(f"{path} is not a whole vocabulary: ranks must go from 0 to {len(found) - 1}")
    return found


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _tokenizer(
    ranks: Mapping[bytes, int], pattern: str, tokens: Mapping[int, AddedToken], path: Path
) -> Tokenizer:
    """A tokenizer with these byte pairs, and added tokens by their ids."""
    letters = _letters()
    vocab = {_written(token, letters): rank for token, rank in ranks.items()}
    for number, token in tokens.items():
        if vocab.setdefault(token.content, number) != number:
            raise ValueError(f"{path}: {token.content!r} is both a special token and in the vocabulary")
    merges = [(_written(left, letters), _written(right, letters)) for left, right in _merges(ranks)]
    # A piece that is a token as a whole is never joined from others.
    made = Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: its pattern cannot be used: {error}") from None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens(list(tokens.values()))
    return made


def _merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Each way to join two tokens into one, in the order of the joined token's rank."""
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _written(token: bytes, letters: Mapping[int, str]) -> str:
    return "".join(map(letters.__getitem__, token))


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a tokenizer.json: the byte itself if it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(others)}
