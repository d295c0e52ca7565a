"""Files become the pixels that transformers makes of them, or an error for their client."""

import io
import json
import struct
import zlib
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import MAX_FILE_BYTES, PreparedImage
from frontend.images.image_process import ImageProcess
from tests.helpers.tiny_tokenizer import checkpoint
from tests.helpers.vision_models import MERGE, PATCH, PROCESSOR, picture, processed
from workers.vision.image_process import make_processor, prepared

SETTINGS = ImageSettings(9, {}, PATCH, MERGE, 48 * (PATCH * MERGE) ** 2, 1 / 255, [0.5] * 3, [0.5] * 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processor")
    (made / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return made


def prepare(content: bytes, directory: Path) -> PreparedImage:
    return prepared(content, _processor(directory), SETTINGS)


_processor = cache(lambda directory: make_processor(directory, SETTINGS))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_pixels_of_transformers(kind: str, directory: Path) -> None:
    """Small images are scaled up, large ones down."""
    for size in ((90, 33), (300, 500), (9, 9)):
        file = picture(*size, kind=kind)
        found, wanted = prepare(file, directory), processed(file)
        assert not found.error
        assert (found.rows * MERGE, found.columns * MERGE) == wanted.grid
        assert found.pixels == wanted.pixels


def test_a_photograph_is_turned_as_its_camera_says(directory: Path) -> None:
    image = Image.open(io.BytesIO(picture(64, 32)))
    exif = image.getexif()
    exif[0x0112] = 6  # turn it by a quarter
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    found = prepare(file.getvalue(), directory)
    assert (found.rows, found.columns) == (8, 4)


def bomb(width: int, height: int) -> bytes:
    """A small PNG file of many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not an image"),
        (b"%PDF-1.4", "not an image"),
        (picture(50, 50)[:200], "truncated"),
        (bomb(1 << 16, 1 << 16), "65536 x 65536 pixels"),
        (bytes(MAX_FILE_BYTES + 1), "bytes"),
        (picture(1000, 3), "aspect ratio"),
    ],
)
def test_files_that_cannot_be_used(content: bytes, why: str, directory: Path) -> None:
    found = prepare(content, directory)
    assert why in found.error and not found.pixels


@pytest.mark.slow
def test_the_process(directory: Path) -> None:
    """One fork for each file; the process ends with its parent's end of it."""
    found = ImageProcess(checkpoint(directory, images=SETTINGS))
    try:
        file = picture(90, 33)
        assert found.prepare(file).pixels == processed(file).pixels
        assert "not an image" in found.prepare(b"x").error
    finally:
        found.close()
    assert found._forks.pid is None
