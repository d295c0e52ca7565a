"""The process that makes pixels of image files, from its parent's side."""

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.images import ImageFile, ImageProcessLaunch, PreparedImage
from atom.shared.utils.fork_server import ForkServer

__all__ = ["MAX_PARALLEL", "ImageProcess", "ImageProcessError"]

MAX_PARALLEL = 2
_CPU_S = 20
_DEADLINE_S = 60
_START_DEADLINE_S = 120.0
_MODULE = "workers.vision.image_process"


class ImageProcessError(Exception):
    """The process has failed, or cannot be started."""


class ImageProcess:
    """Starts the process with the first image, and again after it has died. Safe to use in any thread."""

    def __init__(self, checkpoint: Checkpoint):
        self._decoder: Decoder[PreparedImage] = Decoder(PreparedImage)
        self._forks = ForkServer(
            _MODULE, lambda fd: ImageProcessLaunch(checkpoint, fd, _CPU_S, MAX_PARALLEL, _DEADLINE_S)
        )

    def prepare(self, content: bytes) -> PreparedImage:
        """The pixels of a file, or why it cannot be used. Waits for it. Raises ImageProcessError."""
        timeout_s = _START_DEADLINE_S + 2 * _DEADLINE_S
        try:
            answer, _ = self._forks.ask(encode(ImageFile(content)), timeout_s, _CPU_S)
        except TimeoutError:
            raise ImageProcessError("the image process did not answer in time") from None
        except OSError as error:
            raise ImageProcessError(f"the image process has ended: {error}") from None
        if not answer:
            return PreparedImage(error=f"it takes more than {_CPU_S} s, or too much memory, to decode")
        try:
            return self._decoder.decode(answer)
        except WireError as error:
            raise ImageProcessError(f"the image process sent an {error}") from None

    def close(self) -> None:
        """End the process; an image that it prepares ends without an answer."""
        self._forks.close()
