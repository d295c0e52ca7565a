"""Parts of messages that are images: what is read, and what is refused by name."""

import base64
from typing import Any

import pytest

from atom.shared.messages.images import MAX_FILE_BYTES, MAX_IMAGES
from frontend.errors import RequestError
from frontend.images.image_parts import ImageParts, ImageRules, image_part

FILE = b"any bytes at all"
ENCODED = base64.b64encode(FILE).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{ENCODED}",
        f"data:image/svg+xml;charset=utf-8;base64,{ENCODED}",
        f"DATA:;BASE64,{ENCODED}",
    ],
)
def test_a_data_url(url: str) -> None:
    images = ImageParts(ImageRules())
    assert images.add(image_part(url), "user", "messages[0].content[0]") == {"type": "image"}
    assert images.add({"type": "image_url", "image_url": url}, "tool", "f") == {"type": "image"}
    assert [source.content for source in images.sources] == [FILE, FILE]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"url": "https://example.org/a.png"}, "'https'.*fetches nothing"),
        ({"url": ""}, "has no image: send .* as data:image/png;base64"),
        ({"url": "file:///etc/passwd"}, "fetches nothing"),
        ({"url": ENCODED}, "has no image"),
        ({"url": f"data:image/png,{ENCODED}"}, "has no image"),
        ({"url": "data:image/png;base64,é"}, "not valid base64"),
        ({"url": "data:image/png;base64,QU JD"}, "not valid base64"),
        ({"url": f"data:image/png;base64,{ENCODED}", "detail": "low"}, "detail"),
        ({"url": f"data:image/png;base64,{ENCODED}", "size": 3}, "size"),
        ({"url": None}, "a url"),
        (7, "a url"),
    ],
)
def test_what_is_refused(given: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        ImageParts(ImageRules()).add(
            {"type": "image_url", "image_url": given}, "user", "messages[0].content[0]"
        )
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("messages[0].content[0]")


def test_a_file_that_is_too_large() -> None:
    url = "data:image/png;base64," + "A" * (MAX_FILE_BYTES * 4 // 3 + 8)
    with pytest.raises(RequestError, match="smaller image") as caught:
        ImageParts(ImageRules()).add(image_part(url), "user", "f")
    assert caught.value.status == 413


def test_roles_counts_and_models_without_images() -> None:
    part = image_part(f"data:image/png;base64,{ENCODED}")
    with pytest.raises(RequestError, match="role 'system'"):
        ImageParts(ImageRules()).add(part, "system", "f")
    images = ImageParts(ImageRules())
    for _ in range(MAX_IMAGES):
        images.add(part, "user", "f")
    with pytest.raises(RequestError, match=f"more than {MAX_IMAGES} images"):
        images.add(part, "user", "f")
    with pytest.raises(RequestError, match="'f' is an image, and this one reads text"):
        ImageParts(ImageRules("this one reads text")).add(part, "user", "f")


def test_urls_of_hosts_and_fewer_images() -> None:
    images = ImageParts(ImageRules(most=2, domains=frozenset({"images.test"})))
    for url in ("https://images.test/a.png", f"data:image/png;base64,{ENCODED}"):
        images.add(image_part(url), "user", "f")
    assert [(source.url, source.content) for source in images.sources] == [
        ("https://images.test/a.png", b""),
        ("", FILE),
    ]
    with pytest.raises(RequestError, match="more than 2 images"):
        images.add(image_part("https://images.test/a.png"), "user", "f")
    for url in ("https://other.test/a.png", "file:///etc/passwd", ENCODED):
        with pytest.raises(RequestError, match="does not list|can be fetched"):
            ImageParts(ImageRules(domains=frozenset({"images.test"}))).add(image_part(url), "user", "f")
