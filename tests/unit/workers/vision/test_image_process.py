"""Files become the pixels that transformers makes of them, or an error for their client."""

import io
import json
import os
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import ExifTags, Image, ImageOps

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import MAX_FILE_BYTES, PreparedImage
from atom.shared.utils import fork_server
from frontend.images.image_process import ImageProcess, ImageProcessError
from tests.helpers.checkpoints.tiny_tokenizer import checkpoint
from tests.helpers.checkpoints.vision_models import MERGE, PATCH, PROCESSOR, PROCESSORS, picture, processed
from workers.checkpoint.image_settings import PatchLimits
from workers.vision.image_process import prepared
from workers.vision.image_processors import make_processor, scaled

SETTINGS = ImageSettings(9, {}, PATCH, MERGE, 48 * (PATCH * MERGE) ** 2, 1 / 255, [0.5] * 3, [0.5] * 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processor")
    (made / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return made


def prepare(content: bytes, directory: Path) -> PreparedImage:
    return prepared(content, _processor(directory))


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


@pytest.mark.parametrize("model_type", ["gemma3", "kimi_k25"])
def test_pixels_of_other_processors(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[model_type]))
    maker = make_processor(tmp_path, replace(SETTINGS, processor=model_type))
    for size in ((90, 33), (24, 32), (9, 5)):
        file = picture(*size)
        found, wanted = prepared(file, maker), processed(file, model_type)
        assert not found.error
        assert (found.rows * MERGE, found.columns * MERGE) == wanted.grid
        assert found.pixels == wanted.pixels


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((225, 223), (225, 223)),  # never enlarged
        ((3584, 3584), (1792, 1792)),  # 4 times too many patches
        ((28672, 224), (7168, 56)),  # a side 4 times too long
        ((14000, 1), (7168, 1)),
    ],
)
def test_sizes_of_scaled_images(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert scaled(size, PatchLimits(16384, 512, 4608), 14) == wanted


def test_a_large_image_is_scaled_and_padded(tmp_path: Path) -> None:
    """300 x 500 pixels are 75 x 125 patches, of which 192 remain."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["kimi_k25"]))
    settings = replace(SETTINGS, processor="kimi_k25")
    file = picture(300, 500)
    found = prepared(file, make_processor(tmp_path, settings))
    width, height = 42, 71
    scaled_down = Image.open(io.BytesIO(file)).resize((width, height), Image.Resampling.BICUBIC)
    assert (found.rows, found.columns) == (9, 6)
    padded = np.zeros((9 * 8, 6 * 8, 3), np.uint8)
    padded[:height, :width] = np.asarray(scaled_down)
    whole = io.BytesIO()
    Image.fromarray(padded).save(whole, "PNG")
    assert found.pixels == processed(whole.getvalue(), "kimi_k25").pixels


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_camera_says(orientation: int, directory: Path) -> None:
    image = Image.open(io.BytesIO(picture(64, 32)))
    exif = image.getexif()
    exif[0x0112] = orientation
    file, upright = io.BytesIO(), io.BytesIO()
    image.save(file, "PNG", exif=exif)
    ImageOps.exif_transpose(Image.open(file)).save(upright, "PNG")
    assert prepare(file.getvalue(), directory) == prepare(upright.getvalue(), directory)


def test_a_photograph_with_a_damaged_tag_is_turned(directory: Path) -> None:
    """Its width is a text."""
    tags = struct.pack("<HHIHxx HHI4s", 0x0112, 3, 1, 6, 0x0100, 2, 4, b"abc")
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(64, 32))).save(file, "JPEG", exif=exif)
    found = prepare(file.getvalue(), directory)
    assert (found.rows, found.columns, found.error) == (8, 4, "")


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


@pytest.fixture
def process(directory: Path) -> Iterator[ImageProcess]:
    found = ImageProcess(checkpoint(directory, images=SETTINGS))
    yield found
    found.close()
    assert found._forks.pid is None


@pytest.mark.slow
def test_the_process(process: ImageProcess) -> None:
    """One fork for each file; the process ends with its parent's end of it."""
    file = picture(90, 33)
    assert process.prepare(file).pixels == processed(file).pixels
    assert "not an image" in process.prepare(b"x").error


def forks_of(pid: int) -> list[psutil.Process]:
    return [fork for fork in psutil.Process(pid).children() if fork.status() != psutil.STATUS_ZOMBIE]


def killing(
    process: ImageProcess, monkeypatch: pytest.MonkeyPatch, victims: Callable[[int], Sequence[int]]
) -> None:
    """Kill `victims` of the process that forks in the middle of the next file, of which half has come."""

    def exchanged(connection: socket.socket, frame: bytes, deadline: float) -> bytes:
        monkeypatch.undo()
        connection.sendall(frame[: len(frame) // 2])
        pid = process._forks.pid
        assert pid is not None
        while not forks_of(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for victim in victims(pid):
            os.kill(victim, signal.SIGKILL)
        return exchange(connection, b"", deadline)

    assert process.prepare(picture(9, 9)).pixels  # it has started
    pid, deadline = process._forks.pid, time.monotonic() + 60
    assert pid is not None
    while forks_of(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    exchange = fork_server.exchange
    monkeypatch.setattr(fork_server, "exchange", exchanged)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_kill_of_the_process_is_an_error_of_the_file_in_it_alone(
    process: ImageProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = picture(90, 33)
    killing(process, monkeypatch, lambda pid: [pid])
    with pytest.raises(ImageProcessError, match="the image process has ended: try again"):
        process.prepare(file)
    assert process.prepare(file).pixels == processed(file).pixels


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_file_whose_fork_was_killed_is_prepared_by_another(
    process: ImageProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = picture(90, 33)
    killing(process, monkeypatch, lambda pid: [fork.pid for fork in forks_of(pid)])
    assert process.prepare(file).pixels == processed(file).pixels


def test_an_image_with_damaged_tags_warns_nobody(directory: Path) -> None:
    """pytest makes an error of a warning."""
    orientation = struct.pack("<HHII", int(ExifTags.Base.Orientation), 2, 1 << 20, 8)  # a text beyond the end
    tags = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + orientation + bytes(4)
    file = io.BytesIO()
    Image.new("RGB", (40, 40)).save(file, "JPEG", exif=tags)
    assert not prepare(file.getvalue(), directory).error
