"""Weight files that are whole, cut off or something else, seen from outside."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atom.shared.config.model import ModelConfig
from workers.checkpoint.checkpoint_files import tensors_by_file
from workers.checkpoint.prepare import prepare

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress."""


def model(directory: Path) -> ModelConfig:
    return ModelConfig(model=str(directory))


def saved_weights(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    path = directory / "model.safetensors"
    save_file({"a": np.zeros((8, 8), np.float32), "b": np.ones(3, np.float16)}, path, {"format": "pt"})
    return path


def test_whole_weights_pass(tmp_path: Path) -> None:
    saved_weights(tmp_path)
    assert prepare(model(tmp_path), tmp_path, silent).directory == str(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-1], "model.safetensors is damaged: it has"),
        (lambda data: data + b"x", "model.safetensors is damaged: it has"),
        (lambda data: data[:20], "its header is unreadable"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "its header is unreadable"),
        (lambda data: b"", "its header is unreadable"),
        (lambda data: (2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        (
            lambda data: (10).to_bytes(8, "little") + b'{"a": {}} ',
            "dtype, shape or offsets of a",
        ),
        (lambda data: data.replace(b"[8,8]", b'"8,8"'), "dtype, shape or offsets of a"),
    ],
)
def test_weights_that_are_not_whole_are_named(
    tmp_path: Path, spoil: Callable[[bytes], bytes], words: str
) -> None:
    path = saved_weights(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        prepare(model(tmp_path), tmp_path, silent)
    prepare(ModelConfig(model=str(tmp_path), load_dummy=True), tmp_path, silent)


def test_weights_in_other_forms_are_not_read(tmp_path: Path) -> None:
    saved_weights(tmp_path).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no safetensors files"):
        prepare(model(tmp_path), tmp_path, silent)


def save_shard(directory: Path, name: str, *tensors: str) -> None:
    save_file({each: np.zeros((2, 2), np.float32) for each in tensors}, directory / name, {"format": "pt"})


def test_shards_need_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_shard(tmp_path, "model-00001-of-00002.safetensors", "a")
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        prepare(model(tmp_path), tmp_path, silent)
    save_shard(tmp_path, "model-00002-of-00002.safetensors", "b")
    save_shard(tmp_path, "consolidated.safetensors", "c")
    prepare(model(tmp_path), tmp_path, silent)
    assert [names for _, names in sorted(tensors_by_file(tmp_path).items())] == [["a"], ["b"]]
    save_shard(tmp_path, "model-00002-of-00002.safetensors", "a", "b")
    with pytest.raises(ValueError, match=r"a is both in model-00001.* and in model-00002"):
        prepare(model(tmp_path), tmp_path, silent)


def test_weights_in_the_format_of_mistral_are_refused_by_name(tmp_path: Path) -> None:
    saved_weights(tmp_path).rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match="format of Mistral only"):
        prepare(model(tmp_path), tmp_path, silent)
