"""Images of prompts: from the process that prepares them to the workers.

    frontend -> image process   ImageFile          a file as the client has sent it
             <- image process   PreparedImage      its pixels as the model reads them
    frontend -> core            PromptImage        in an AddRequest
    core     -> worker          LoadImage          before the first step that needs its features
                                RowImage           in a NewRow
                                DropImage          once its features give way to those of others

Pixels are bytes, uint8, in the order in which a vision tower reads them:
[patches, channels, patch height, patch width]. The patches of one token are neighbours.
"""

import msgspec

from atom.shared.config.checkpoint import Checkpoint

MAX_IMAGES = 64
"""Most images of one prompt."""
MAX_FILE_BYTES = 20 * 1024 * 1024
"""Bytes of an image as the client sends it."""
MAX_FILE_PIXELS = 64 * 1024 * 1024
"""Width times height of an image as the client sends it: 192 MiB once it is decoded."""
MAX_PREPARED_BYTES = 24 * 1024 * 1024
"""Pixels of a prepared image: 8 Mi pixels. Larger images are scaled down."""
KEY_BYTES = 16


class ImageProcessLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.vision.image_process`."""

    checkpoint: Checkpoint
    control_fd: int
    """An inherited Unix socket, over which the parent passes one connected socket for each file."""
    cpu_s: int
    """Seconds of CPU time for each file; what takes longer is killed."""
    max_parallel: int
    """Files that are prepared at a time."""
    deadline_s: int
    """Seconds of wall time for each file; what takes longer is killed."""


class ImageFile(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a fork of the image process prepares."""

    content: bytes


class PreparedImage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Its answer."""

    key: bytes = b""
    """Digest of the other fields."""
    rows: int = 0
    """Tokens in a column of the image."""
    columns: int = 0
    """Tokens in a row."""
    pixels: bytes = b""
    error: str = ""
    """Why the file cannot be used; else empty."""


class PromptImage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An image of a prompt, whose tokens from `start` on are placeholders for it."""

    key: bytes
    """Digest of grid and pixels: images with the same key have the same features."""
    start: int
    rows: int
    columns: int
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.rows * self.columns


class RowImage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where an image is in the prompt of a row of the workers' batch; fields as in `PromptImage`."""

    key: bytes
    start: int
    rows: int
    columns: int


class LoadImage(msgspec.Struct, tag=27, array_like=True, frozen=True, gc=False):
    """Compute the features of an image, and keep them until `DropImage`."""

    key: bytes
    rows: int
    columns: int
    pixels: bytes


class DropImage(msgspec.Struct, tag=28, array_like=True, frozen=True, gc=False):
    """Steps sent from now on do not need these features."""

    key: bytes
