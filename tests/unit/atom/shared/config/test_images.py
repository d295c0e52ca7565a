"""Which images requests may have."""

import pytest

from atom.shared.config.fields import ConfigError
from atom.shared.config.images import image_limit, media_domains


@pytest.mark.parametrize(
    ("text", "most"),
    [(None, 64), ("{}", 64), ('{"image": 0}', 0), ('{"image": {"count": 3}, "video": 0}', 3)],
)
def test_limits(text: str | None, most: int) -> None:
    assert image_limit(text) == most


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image": 65}', "at most 64 images"),
        ('{"image": -1}', "a number from 0 on"),
        ('{"image": true}', "a number from 0 on"),
        ('{"image": {"width": 9}}', "width of image is not supported"),
        ('{"video": 1}', "video is not supported"),
        ('{"images": 1}', "images is not supported; use image"),
    ],
)
def test_other_limits_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        image_limit(text)


def test_domains() -> None:
    assert media_domains(None) == frozenset()
    assert media_domains("Images.example.org, cdn.test:8443,[2606::1]:81") == {
        "images.example.org",
        "cdn.test:8443",
        "[2606::1]:81",
    }


@pytest.mark.parametrize(
    "text", ["https://a.test", "*.a.test", "a.test/b", "a.test:x", "u@a.test", ".", "a b"]
)
def test_other_domains_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        media_domains(text)
