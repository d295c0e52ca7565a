"""Tokens that are added outside of tokenizer.json: ids and flags equal transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workers.checkpoint.tokenizer_files import find_tokenizer

WORDS = ["<unk>", "</s>", "a", "b", "c", "ab", "x", "Ġ", "<", ">", "t", "h"]
BOUNDLESS = 10**6
TEXTS = ("a <t> b", "a<t>b", "  <t>  a", "ab</s>", "<h> a<H>", "a <x> <unk> b<y>", "tab<t>tb <t>b", "<A>a")


def entry(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"content": text, **plain, **flags}


def save(directory: Path, **files: Any) -> None:
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("a", "b")], unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<unk>", special=True), AddedToken("<h>", rstrip=True)])
    made.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


CASES: list[dict[str, Any]] = [
    {"tokenizer_config": {"added_tokens_decoder": {"13": entry("<t>", lstrip=True, special=True)}}},
    {"tokenizer_config": {"added_tokens_decoder": {"13": entry("<t>", rstrip=True), "12": entry("<h>")}}},
    {
        "tokenizer_config": {
            "added_tokens_decoder": {"14": entry("<x>"), "13": entry("<t>", single_word=True)}
        }
    },
    {"tokenizer_config": {"added_tokens_decoder": {"1": entry("</s>")}, "eos_token": "</s>"}},
    {"tokenizer_config": {"eos_token": "</s>", "image_token": "<t>", "additional_special_tokens": ["<x>"]}},
    {
        "tokenizer_config": {
            "extra_special_tokens": {"image_token": "<t>", "audio_token": "<y>"},
            "added_tokens_decoder": {"13": entry("<t>")},
        }
    },
    {"tokenizer_config": {"extra_special_tokens": ["<t>", "<x>"], "additional_special_tokens": ["<y>"]}},
    {"added_tokens": {"<t>": 13, "<x>": 14}},
    {"added_tokens": {"<t>": 13, "<x>": 14}, "tokenizer_config": {"additional_special_tokens": ["<x>"]}},
    {"added_tokens": {"<A>": 13}, "special_tokens_map": {"eos_token": entry("</s>", lstrip=True)}},
    {"special_tokens_map": {"additional_special_tokens": ["<t>", "<x>"], "bos_token": "<y>"}},
    {"tokenizer_config": {"bos_token": "<unk>"}},
    {},
]


@pytest.mark.parametrize("files", CASES, ids=str)
def test_tokens_equal_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    save(tmp_path, **files)
    found = find_tokenizer(tmp_path, files.get("tokenizer_config", {}), BOUNDLESS, tmp_path / "cache")
    assert found.path is not None
    ours = Tokenizer.from_file(str(found.path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).backend_tokenizer
    assert repr(ours.get_added_tokens_decoder()) == repr(theirs.get_added_tokens_decoder())
    for text in TEXTS:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        for skip in (True, False):
            assert ours.decode(wanted, skip) == theirs.decode(wanted, skip)
    if files in ({}, {"tokenizer_config": {"bos_token": "<unk>"}}):
        assert found.path == tmp_path / "tokenizer.json"


def test_a_token_outside_of_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    config = {"pad_token": "<pad>", "eos_token": "</s>"}
    save(tmp_path, tokenizer_config=config)
    found = find_tokenizer(tmp_path, config, 13, tmp_path / "cache")
    assert found.path is not None
    (warning,) = found.warnings
    assert "'<pad>'" in warning and "13" in warning
    made = Tokenizer.from_file(str(found.path))
    assert made.token_to_id("<pad>") is None and 1 in made.get_added_tokens_decoder()


def test_an_id_that_no_file_gives_is_named(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"40": entry("<t>")}}
    save(tmp_path, tokenizer_config=config)
    found = find_tokenizer(tmp_path, config, BOUNDLESS, tmp_path / "cache")
    (warning,) = found.warnings
    assert "id 40 for '<t>'" in warning and "13 is used" in warning


def test_values_of_another_type_are_named(tmp_path: Path) -> None:
    for files, words in (
        ({"tokenizer_config": {"added_tokens_decoder": ["<t>"]}}, "added_tokens_decoder must map ids"),
        ({"added_tokens": {"<t>": "13"}}, "the id of '<t>' must be a whole number"),
    ):
        save(tmp_path, **files)
        with pytest.raises(ValueError, match=words):
            find_tokenizer(tmp_path, files.get("tokenizer_config", {}), BOUNDLESS, tmp_path / "cache")
