"""The process that makes pixels of image files, from its parent's side."""

import socket
import time

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.images import ImageFile, ImageProcessLaunch, PreparedImage
from atom.shared.utils.fork_server import ForkServer, exchange

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
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    pid = self._forks.pass_descriptors([theirs.fileno()])
                except OSError as error:
                    raise ImageProcessError(f"the image process has ended: {error}") from None
            deadline = time.monotonic() + _START_DEADLINE_S + 2 * _DEADLINE_S
            try:
                answer = exchange(ours, encode(ImageFile(content)), deadline)
            except TimeoutError:
                raise ImageProcessError("the image process did not answer in time") from None
        if answer:
            try:
                return self._decoder.decode(answer)
            except WireError as error:
                raise ImageProcessError(f"the image process sent an {error}") from None
        if self._forks.has_ended(pid):
            raise ImageProcessError("the image process has ended")
        return PreparedImage(error=f"it takes more than {_CPU_S} s, or too much memory, to decode")

    def close(self) -> None:
        """End the process; an image that it prepares ends without an answer."""
        self._forks.close()
