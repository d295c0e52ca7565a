"""Images of a prompt become pixels, and placeholders of their number."""

import asyncio
from typing import cast

import pytest

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import PreparedImage
from frontend.errors import RequestError, UnavailableError
from frontend.images.image_fetcher import ImageFetcher
from frontend.images.image_parts import ImageSource
from frontend.images.image_preparer import ImagePreparer, expanded
from frontend.images.image_process import ImageProcess, ImageProcessError

SETTINGS = ImageSettings(9, {}, 4, 2, 1 << 12, 1 / 255, [0.5] * 3, [0.5] * 3)


class Process:
    """Files are their own pixels."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def prepare(self, content: bytes) -> PreparedImage:
        self.calls.append(content)
        if content == b"dead":
            raise ImageProcessError("the image process has ended")
        if content == b"bad":
            return PreparedImage(error="it is not an image")
        return PreparedImage(content, 1, len(content), content)

    def close(self) -> None:
        pass


def prepared(process: Process, *files: bytes) -> list[list[PreparedImage]]:
    """Each file alone, one after the other."""
    preparer = ImagePreparer(cast(ImageProcess, process), SETTINGS)

    async def run() -> list[list[PreparedImage]]:
        return [await preparer.prepare([ImageSource(file, "f")]) for file in files]

    try:
        return asyncio.run(run())
    finally:
        preparer.close()


def test_files_that_come_again_are_not_prepared_again() -> None:
    process = Process()
    found = prepared(process, b"one", b"two", b"one")
    assert [[image.pixels for image in images] for images in found] == [[b"one"], [b"two"], [b"one"]]
    assert process.calls == [b"one", b"two"]


def test_files_that_are_fetched() -> None:
    class Fetcher:
        async def fetch(self, url: str, field: str) -> bytes:
            assert field == "f"
            return url.encode()

    process = Process()
    preparer = ImagePreparer(cast(ImageProcess, process), SETTINGS, cast(ImageFetcher, Fetcher()))
    try:
        sources = [ImageSource(b"", "f", "https://a.test/x"), ImageSource(b"one", "f")]
        images = asyncio.run(preparer.prepare(sources))
    finally:
        preparer.close()
    assert [image.pixels for image in images] == process.calls == [b"https://a.test/x", b"one"]


def test_errors() -> None:
    with pytest.raises(RequestError, match="'f': it is not an image") as caught:
        prepared(Process(), b"bad")
    assert caught.value.param == "f"
    with pytest.raises(UnavailableError, match="has ended"):
        prepared(Process(), b"dead")


def test_placeholders() -> None:
    images = [PreparedImage(b"a", 2, 3, b"x"), PreparedImage(b"b", 1, 1, b"y")]
    ids, placed = expanded([1, 9, 2, 9], 9, images, most=9)
    assert ids == [1, *[9] * 6, 2, 9]
    assert [(image.key, image.start, image.end, image.pixels) for image in placed] == [
        (b"a", 1, 7, b"x"),
        (b"b", 8, 9, b"y"),
    ]
    with pytest.raises(RequestError, match="shows 1 of the 2 images"):
        expanded([1, 9], 9, images, most=100)
    with pytest.raises(RequestError, match="9 tokens with its images") as caught:
        expanded([1, 9, 2, 9], 9, images, most=8)
    assert caught.value.code == "context_length_exceeded"
