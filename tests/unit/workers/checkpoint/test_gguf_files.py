"""GGUF models in several files: found by the first one, or by their directory."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.gguf_files import hf_weights, write_gguf
from workers.checkpoint.gguf_files import first_files, of_quantization, part_names
from workers.checkpoint.prepare import converted_gguf, prepare

PARTS = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress reports."""


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A directory with the three parts of a model."""
    directory = tmp_path / "split"
    directory.mkdir()
    write_gguf(directory / "m.gguf", hf_weights(), tensors_per_part=5)
    assert sorted(path.name for path in directory.iterdir()) == PARTS
    return directory


def error_of(path: Path) -> str:
    with pytest.raises(ValueError) as raised:
        prepare(ModelConfig(model=str(path)), path.parent / "cache", silent)
    return str(raised.value)


def test_a_split_model_is_that_of_one_file(split: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights())
    paths = (split / PARTS[0], split, tmp_path / "m.gguf")
    first, directory, whole = (
        prepare(ModelConfig(model=str(path)), tmp_path / "cache", silent) for path in paths
    )
    assert first == directory
    made = load_file(Path(first.directory) / "model.safetensors")
    expected = load_file(Path(whole.directory) / "model.safetensors")
    assert made.keys() == expected.keys() == hf_weights().keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(made[name], array)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert Path(first.directory, name).read_bytes() == Path(whole.directory, name).read_bytes()


def test_a_vision_model_in_the_same_directory_is_none_to_choose_from(split: Path) -> None:
    (split / "mmproj-F16.gguf").write_text("x")
    prepare(ModelConfig(model=str(split)), split / "cache", silent)


def test_another_part_than_the_first_names_it(split: Path) -> None:
    assert f"{PARTS[1]} is part 2 of 3 of a model: name the first, {PARTS[0]}" in error_of(split / PARTS[1])


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_part_is_named(split: Path, missing: int) -> None:
    (split / PARTS[missing]).unlink()
    assert f"one of 3 parts of a model, of which 1 are not there, such as {PARTS[missing]}" in error_of(split)


def test_a_truncated_part_is_named(split: Path) -> None:
    content = (split / PARTS[2]).read_bytes()
    (split / PARTS[2]).write_bytes(content[:-2000])
    assert f"{PARTS[2]} is truncated" in error_of(split)


def test_parts_under_other_names_are_refused(split: Path) -> None:
    shutil.copy(split / PARTS[0], split / "renamed.gguf")
    assert "renamed.gguf is, by its metadata, part 1 of 3" in error_of(split / "renamed.gguf")
    (split / "renamed.gguf").unlink()
    shutil.copy(split / PARTS[1], split / PARTS[2])
    assert f"{PARTS[2]} is, by its metadata, part 2 of 3" in error_of(split)


def test_parts_of_different_models_are_refused(split: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    weights = hf_weights()
    write_gguf(other / "m.gguf", dict(list(weights.items())[:11]), tensors_per_part=5)
    shutil.copy(other / PARTS[2], split / PARTS[2])
    assert f"the parts of {PARTS[0]} have 11 tensors, and not 12" in error_of(split)


def test_a_change_of_any_part_is_converted_again(split: Path, tmp_path: Path) -> None:
    first = converted_gguf(split / PARTS[0], tmp_path, silent)
    assert converted_gguf(split / PARTS[0], tmp_path, silent) == first
    (split / PARTS[2]).touch()
    assert converted_gguf(split / PARTS[0], tmp_path, silent) != first


def test_names() -> None:
    assert part_names("a/b.gguf") == ["a/b.gguf"]
    assert part_names("b-00001-of-00000.gguf") == ["b-00001-of-00000.gguf"]  # a name as any other
    assert part_names("a/b-00001-of-00002.gguf") == ["a/b-00001-of-00002.gguf", "a/b-00002-of-00002.gguf"]
    files = [
        *("Q4_K_M/x-Q4_K_M-00002-of-00002.gguf", "Q4_K_M/x-Q4_K_M-00001-of-00002.gguf", "README.md"),
        *("x.Q8_0.gguf", "x-Q4_K_S.gguf", "mmproj-Q8_0.gguf"),
    ]
    assert first_files(files) == ["Q4_K_M/x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_S.gguf", "x.Q8_0.gguf"]
    assert of_quantization(files, "q4_k_m") == ["Q4_K_M/x-Q4_K_M-00001-of-00002.gguf"]
    assert of_quantization(files, "Q8_0") == ["x.Q8_0.gguf"]
    assert of_quantization(files, "Q4_K") == []
