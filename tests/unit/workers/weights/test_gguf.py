"""GGUF files: converted weights, tokenizer and configuration, the conversion cache, refused files."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.gguf_files import TOKENS, hf_weights, write_gguf
from workers.checkpoint.prepare import converted_gguf, prepare
from workers.weights import gguf as gguf_module

DEADLINE_S = 60


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress reports."""


def model(path: str | Path) -> ModelConfig:
    return ModelConfig(model=str(path))


def test_a_gguf_is_converted_to_its_original_weights(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "m.gguf", weights)
    checkpoint = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    made = load_file(Path(checkpoint.directory) / "model.safetensors")
    assert made.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(made[name], array, err_msg=name)
    config = checkpoint.hf_config
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, False)
    assert (checkpoint.dtype, checkpoint.vocab_size, checkpoint.max_model_len) == (
        "float32",
        len(TOKENS),
        512,
    )
    assert checkpoint.eos_token_ids == [TOKENS.index("hi"), TOKENS.index("<|end|>")]
    assert checkpoint.template_tokens["bos_token"] == "<|bos|>"
    assert checkpoint.add_bos_token is False  # tokenizer.json adds it itself
    assert checkpoint.chat_template_file is not None
    assert Path(checkpoint.chat_template_file).read_text() == "{{ messages }}"


def test_a_gguf_tokenizer_splits_merges_and_adds_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(tied=True))
    checkpoint = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    assert checkpoint.hf_config["tie_word_embeddings"] is True
    assert checkpoint.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
    assert tokenizer.encode("hi<|end|>").tokens == ["<|bos|>", "hi", "<|end|>"]
    assert tokenizer.encode("1212", add_special_tokens=False).tokens == ["12", "1", "2"]  # words of 3 digits
    text = "naïve 中文 🍕\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "MAX_SHARD_BYTES", 40_000)
    weights = hf_weights()
    write_gguf(tmp_path / "m.gguf", weights)
    directory = Path(prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys()
    assert len(set(index.values())) > 1
    for file_name in set(index.values()):
        found = load_file(directory / file_name)
        assert found.keys() == {name for name, file in index.items() if file == file_name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kind": "starcoder2"},
            "architecture starcoder2; supported: deepseek2, deepseek32, gemma2, gemma3, glm-dsa",
        ),
        ({"add_expert_count": 8}, r"lacks llama\.expert_used_count"),
        ({"add_rope_dimension_count": 4}, "lacks .*_proj.weight in the shape"),
        ({"add_tokenizer_pre": "unheard-of"}, "unheard-of"),
        ({"add_tokenizer_model": "llama", "add_add_space_prefix": False}, "add_space_prefix"),
        ({"add_tokenizer_model": "bert"}, "cannot be expanded: .*'bert'"),
    ],
)
def test_unsupported_ggufs_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(), **change)
    with pytest.raises(ValueError, match=words):
        prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    assert not list((tmp_path / "cache").glob("gguf/*.partial"))


def test_a_tensor_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "more.gguf", weights | {"blk.0.mystery.weight": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"'blk\.0\.mystery\.weight'"):
        prepare(model(tmp_path / "more.gguf"), tmp_path / "cache", silent)
    del weights["model.norm.weight"]
    write_gguf(tmp_path / "fewer.gguf", weights)
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        prepare(model(tmp_path / "fewer.gguf"), tmp_path / "cache", silent)


def test_llama3_rope_parameters_are_derived_from_the_factors(tmp_path: Path) -> None:
    # Of theta 1e6 and 8 dimensions: waves of 6, 199, 6283 and 198692 positions. The last is
    # stretched by the whole factor, the third, between 8192 / 4 and 8192, by a part of it.
    smooth = (8192 / (2 * np.pi * 1000) - 1) / (4 - 1)
    factors = np.array([1, 1, 1 / ((1 - smooth) / 32 + smooth), 32], np.float32)
    for name, stored in (("m", factors), ("odd", factors[::-1].copy())):
        weights = hf_weights() | {"rope_freqs.weight": stored}
        write_gguf(tmp_path / f"{name}.gguf", weights, add_rope_freq_base=1e6)
    assert prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).hf_config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ValueError, match="not those of Llama 3"):
        prepare(model(tmp_path / "odd.gguf"), tmp_path / "cache", silent)


def test_rope_scaling_is_kept(tmp_path: Path) -> None:
    scaling = {
        "add_rope_freq_base": 5e5,
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 4.0,
        "add_rope_scaling_orig_ctx_len": 128,
    }
    write_gguf(tmp_path / "m.gguf", hf_weights(), **scaling)
    rope = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).hf_config["rope_parameters"]
    expected = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    assert rope == expected | {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("smollm", ["ĠĠ", "1", "2"]),
        ("refact", ["ĠĠ", "1", "2"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2"]),
        ("glm4", ["Ġ", "Ġ", "12"]),
        ("deepseek-v3", ["ĠĠ", "12"]),
        ("kimi-k2", ["Ġ", "Ġ", "12"]),
    ],
)
def test_pre_tokenizers_split_digits_as_named(tmp_path: Path, words: str, tokens: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(), add_tokenizer_pre=words)
    file = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).tokenizer_file
    assert file is not None
    assert Tokenizer.from_file(file).encode("  12", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize("words", ["tekken", "llama-bpe", "falcon3"])
def test_words_that_are_tokens_are_not_split(tmp_path: Path, words: str) -> None:
    """`<|` is a token that no merge makes."""
    tokens = [*TOKENS[:-3], "<|", *TOKENS[-2:]]
    more = {"add_token_list": tokens, "add_token_merges": ["h i"]}
    write_gguf(tmp_path / "m.gguf", hf_weights(), add_tokenizer_pre=words, **more)
    file = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).tokenizer_file
    assert file is not None
    assert Tokenizer.from_file(file).encode("<|").tokens == ["<|bos|>", "<|"]


def test_tokens_end_a_sequence_by_their_text(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-4], "<|im_end|>", "<|endoftext|>", *TOKENS[-2:]]
    more = {"add_token_list": tokens, "add_token_merges": ["h i"]}
    write_gguf(tmp_path / "m.gguf", hf_weights(), **more)
    ends = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).eos_token_ids
    assert {tokens[number] for number in ends} == {"hi", "<|end|>", "<|im_end|>", "<|endoftext|>"}


def test_a_message_of_gpt_oss_does_not_end_its_reply(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-4], "<|return|>", "<|call|>", *TOKENS[-2:]]
    eot = {"add_eot_token_id": tokens.index("<|return|>")}
    more = {"add_token_list": tokens, "add_token_merges": ["h i"], **eot}
    write_gguf(tmp_path / "m.gguf", hf_weights(), **more)
    ends = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).eos_token_ids
    assert {tokens[number] for number in ends} == {"hi", "<|return|>", "<|call|>"}


# The cache


def test_a_conversion_is_reused_until_its_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    phases: list[str] = []
    first = converted_gguf(path, cache, lambda phase, done, total: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["Converting m.gguf"]
    phases.clear()
    assert converted_gguf(path, cache, lambda phase, done, total: phases.append(phase)) == first
    assert phases == []
    write_gguf(path, hf_weights(tied=True))
    assert converted_gguf(path, cache, silent) != first


def test_the_files_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    directory = converted_gguf(path, cache, silent)
    partial = directory.with_name(directory.name + ".partial")
    directory.rename(partial)
    (partial / "leftover").write_text("x")
    assert converted_gguf(path, cache, silent) == directory
    assert not (directory / "leftover").exists() and not partial.exists()


def _expand_elsewhere(path: Path, cache: Path) -> None:
    converted_gguf(path, cache, silent)


def test_two_concurrent_starts_convert_once(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    context = multiprocessing.get_context("spawn")
    starts = [context.Process(target=_expand_elsewhere, args=(path, cache)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(DEADLINE_S)
        assert start.exitcode == 0
    made = [entry for entry in (cache / "gguf").iterdir() if entry.is_dir()]
    assert made == [converted_gguf(path, cache, silent)]
