"""Sizes in bytes."""

import pytest

from atom.shared.config.fields import ConfigError, size_in_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("1.5 Gi", 3 << 29),
        ("2GB", 2 * 10**9),
        ("2kb", 2000),
        ("3T", 3 << 40),
        ("17B", 17),
        ("0.1K", 102),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-4G", "4X", "1.5", "4i", "4GiBs", "1e9", "٤G", "9" * 30, "4 G B"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size in bytes, such as 4G"):
        size_in_bytes(text)
