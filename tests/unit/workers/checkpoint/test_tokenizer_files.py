"""Which tokenizer a directory has, and what is converted."""

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from workers.checkpoint import tokenizer_files
from workers.checkpoint.tokenizer_files import find_tokenizer

KIMI = {"tokenizer_class": "TikTokenTokenizer"}


def save_bytes(directory: Path, *words: bytes) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), *words]
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))


def test_a_conversion_is_made_once_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bytes(tmp_path, b"ab")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(KIMI))
    first = find_tokenizer(tmp_path, KIMI, 1000, tmp_path / "cache").path
    assert first is not None and Tokenizer.from_file(str(first)).encode("ab").ids == [256]
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_files, "tiktoken_tokenizer", None)
        assert find_tokenizer(tmp_path, KIMI, 1000, tmp_path / "cache").path == first
    config = KIMI | {"added_tokens_decoder": {"257": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other = find_tokenizer(tmp_path, config, 1000, tmp_path / "cache").path
    assert other is not None and Tokenizer.from_file(str(other)).token_to_id("<|im_end|>") == 257


def test_tokenizer_json_has_precedence(tmp_path: Path) -> None:
    save_bytes(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert find_tokenizer(tmp_path, {}, 1000, tmp_path / "cache").path == tmp_path / "tokenizer.json"


def test_sentencepiece_needs_packages_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    for installed, words in (
        ((), "sentencepiece and protobuf must be"),
        (("sentencepiece",), " protobuf must"),
    ):
        monkeypatch.setattr(tokenizer_files, "_is_installed", installed.__contains__)
        with pytest.raises(ValueError, match=words):
            find_tokenizer(tmp_path, {}, 1000, tmp_path / "cache")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path, {}, 1000, tmp_path / "cache").path is None


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        find_tokenizer(tmp_path, {}, 1000, tmp_path / "cache")
