"""A GGUF file that is shorter than its header says."""

from pathlib import Path

import pytest

from tests.helpers.checkpoints.gguf_files import hf_weights, write_gguf
from workers.checkpoint.gguf_size import check_gguf_size
from workers.checkpoint.prepare import converted_gguf


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    path = tmp_path / "whole.gguf"
    write_gguf(path, hf_weights())
    check_gguf_size(path)
    return path.read_bytes()


def error_of(directory: Path, content: bytes) -> str:
    path = directory / "cut.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        check_gguf_size(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_the_last_tensor_is_not_whole(whole: bytes, tmp_path: Path) -> None:
    padding = len(whole) - len(whole.rstrip(b"\0"))  # of the last tensor, up to the alignment
    cut = len(whole) - padding - 8
    error = error_of(tmp_path, whole[:cut])
    assert f"its tensors need {len(whole):,} bytes, and the file has {cut:,}: fetch it again" in error


def test_every_cut_of_the_header_is_found(whole: bytes, tmp_path: Path) -> None:
    end = whole.index(b"output_norm.weight")
    for cut in [*range(1, 60), *range(60, end, 37)]:
        error = error_of(tmp_path, whole[:cut])
        assert "its header alone needs at least" in error and f"the file has {cut:,}" in error


def test_an_empty_file(tmp_path: Path) -> None:
    assert "is empty" in error_of(tmp_path, b"")


def test_other_files_are_left_to_the_library(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    for content in (
        b"some text, and no GGUF",
        whole[:4] + b"\0\0\0\3" + whole[8:],
        whole[:4] + b"\1" + whole[5:],
    ):
        path.write_bytes(content)
        check_gguf_size(path)


def test_nothing_is_prepared(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-4000])
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match="is truncated"):
        converted_gguf(path, cache, lambda phase, done, total: None)
    assert list((cache / "gguf").iterdir()) == []
