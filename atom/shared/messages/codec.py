"""One typed encoder and decoder per socket.

Frames are msgpack. A frame over `max_bytes` or of the wrong shape raises `WireError`: a broken peer
causes an error message, never an arbitrary object.
"""

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """A frame that is too large or does not decode as the type its socket carries."""


def encode(message: msgspec.Struct) -> bytes:
    """One msgpack frame."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes frames of one tagged union: `Decoder[ToCore](ToCore)`."""

    def __init__(self, union: Any, max_bytes: int = MAX_FRAME_BYTES):
        self._decoder = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> T:
        """Raises `WireError`."""
        if len(frame) > self._max_bytes:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {self._max_bytes}")
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"undecodable frame of {len(frame)} bytes: {error}") from error
        return message
