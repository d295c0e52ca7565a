"""`python -m workers.vision.image_process`: makes pixels of image files, started by a frontend.

A frontend does not import torch, which transformers' image processors do, and decoders of images read what
strangers send. So each file is decoded and scaled in a fork (`workers.forks`), whose time and memory the
kernel bounds; and once, not on every rank: a step of the workers does not wait for it.

    fork   <- ImageFile,  -> PreparedImage; the socket is closed without one if the fork was ended
"""

import hashlib
import io
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.images import (
    KEY_BYTES,
    MAX_FILE_BYTES,
    MAX_FILE_PIXELS,
    ImageFile,
    ImageProcessLaunch,
    PreparedImage,
)
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.forks import ForkLimits, serve_forks
from workers.vision.image_processors import Prepare, make_processor

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

# Before numpy and torch start pools of threads, which a fork would not have.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

_MAX_MEMORY = 1 << 30  # that a fork may allocate
_NICE = 10  # preparing gives way to the steps of the engine
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that clients send; Pillow's decoders of others are not offered to strangers."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What makes an image upright, by the orientation that its camera has noted."""


def main() -> None:
    """Serve until the parent closes the control socket."""
    launch = read_launch(ImageProcessLaunch)
    setup_logging("images")
    settings = launch.checkpoint.images
    assert settings is not None, "only models that take images have this process"

    def serve(connection: socket.socket, _: list[int], prepare: Prepare) -> None:
        os.nice(_NICE)
        signal.setitimer(signal.ITIMER_PROF, launch.cpu_s)
        signal.alarm(launch.deadline_s)
        with connection.makefile("rwb") as stream:
            file = Decoder[ImageFile](ImageFile).decode(stream.read())
            stream.write(encode(prepared(file.content, prepare)))

    prepare = make_processor(Path(launch.checkpoint.directory), settings)
    limits = ForkLimits(_MAX_MEMORY, launch.max_parallel)
    serve_forks(socket.socket(fileno=launch.control_fd), prepare, limits, serve)


def prepared(content: bytes, prepare: Prepare) -> PreparedImage:
    """The pixels of a file, or why it cannot be used."""
    if len(content) > MAX_FILE_BYTES:
        return PreparedImage(error=f"it has {len(content)} bytes, and at most {MAX_FILE_BYTES} are possible")
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of damaged tags, in the server's log
            image = _decoded(content)
        if isinstance(image, PreparedImage):
            return image
        rows, columns, pixels = prepare(image)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's, of a damaged file; of a shape like a line
        return PreparedImage(error=one_line(error, OSError, SyntaxError, ValueError))
    key = hashlib.blake2b(repr((rows, columns)).encode() + pixels, digest_size=KEY_BYTES).digest()
    return PreparedImage(key, rows, columns, pixels)


def _decoded(content: bytes) -> "PilImage | PreparedImage":
    """The image, RGB and upright, or why it cannot be used. Raises what Pillow does for a damaged file."""
    from PIL import Image, UnidentifiedImageError
    from PIL.ExifTags import Base

    Image.MAX_IMAGE_PIXELS = None  # checked here, with an error instead of a warning
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as file:
            width, height = file.size
            if width * height > MAX_FILE_PIXELS:
                return PreparedImage(
                    error=f"it has {width} x {height} pixels, and at most {MAX_FILE_PIXELS} are possible"
                )
            # ImageOps.exif_transpose writes the other tags again, and fails if one of them is damaged.
            turn = _TURNS.get(file.getexif().get(Base.Orientation, 1))
            return (file if turn is None else file.transpose(Image.Transpose[turn])).convert("RGB")
    except UnidentifiedImageError:
        return PreparedImage(error=f"it is not an image of a known format ({', '.join(_FORMATS)})")


if __name__ == "__main__":
    main()
