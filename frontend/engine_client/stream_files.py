"""The files of streams that can be resumed: what is left of one whose frontend and engine have both died.

    RUN_DIRECTORY/streams/KEY    frames: the stream as its frontend got it, then each update of a sequence

A frontend writes an update before a client gets it, and holds a lock on the file. The kernel releases that
when the frontend dies: then another frontend of this host, or the next life of the same one, may take the
stream. It does so once no engine has it: what an engine has is more recent.
"""

import asyncio
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.engine import AddRequest, FinishReason
from atom.shared.messages.resume import (
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    EndedSequence,
)
from atom.shared.utils.logger import RareWarning, get_logger
from frontend.text.output_processor import SequenceOutput, end_of

__all__ = ["MOST_BYTES", "StreamFile", "StreamFiles", "StreamHeldError"]

_LENGTH = struct.Struct("<I")
MOST_BYTES = 8 << 20
"""Most bytes of a stream's requests: these are written within a few milliseconds."""
_FAILED = frozenset({FinishReason.ABORTED, FinishReason.ERROR, FinishReason.REFUSED, FinishReason.OVERLOADED})
"""Ends after which a stream does not go on."""


class _Update(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """New ids of a sequence, its end, or both."""

    request_id: int
    output_ids: bytes
    """Packed int32."""
    cached_tokens: int = 0
    reason: int = -1
    """A FinishReason; -1: it goes on."""
    stop_token_id: int = -1


_claimed: Decoder[Claimed] = Decoder(Claimed)
_update: Decoder[_Update] = Decoder(_Update)
_request: Decoder[AddRequest] = Decoder(AddRequest)


class StreamHeldError(Exception):
    """A living frontend has the stream."""


class StreamFile:
    """The file of a stream that this frontend has. A failure to write is logged, and removes it."""

    def __init__(self, path: Path, descriptor: int, failure: RareWarning):
        self._path = path
        self._descriptor = descriptor
        self._failure = failure

    def add(self, update: SequenceOutput) -> None:
        """Append what is new; nothing after `remove`."""
        end = end_of(update)
        reason, stop_token_id = (-1, -1) if end is None else (int(end.reason), end.stop_token_id)
        ids = update.token_ids.tobytes()
        self.write(_Update(update.request_id, ids, update.cached_tokens, reason, stop_token_id))

    def write(self, message: msgspec.Struct) -> None:
        """Append a frame."""
        if self._descriptor < 0:
            return
        frame = encode(message)
        frame = _LENGTH.pack(len(frame)) + frame
        try:
            if os.write(self._descriptor, frame) != len(frame):
                raise OSError("the disk is full")
        except OSError as error:
            self._failure.log(f"streams can be resumed only while their frontend or engine lives: {error}")
            self.remove()

    def leave(self) -> tuple[Path, int]:
        """Close it and leave it where it is; returns its path and inode. Nothing is written from now on."""
        inode = os.fstat(self._descriptor).st_ino if self._descriptor >= 0 else 0
        self._close()
        return self._path, inode

    def remove(self) -> None:
        """Remove the file of a stream that has ended or has another file now. May be called twice."""
        if self._descriptor < 0:
            return
        if _is_at(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class StreamFiles:
    """The files in `directory`, which all frontends of this host have; None: streams have none."""

    def __init__(self, directory: Path | None):
        self._directory = directory
        self._failure = RareWarning()
        """A full disk fails the files of all streams."""

    def begin(self, claimed: Claimed) -> StreamFile | None:
        """A file for a stream that this frontend has from now on, in place of another's; None without one.

        A failure is logged. Requests that take long to write, as those with large images, have none.
        """
        if self._directory is None or sum(len(part.request) for part in claimed.requests) > MOST_BYTES:
            return None
        path = self._directory / claimed.key
        made = path.with_name(f"{claimed.key}.{os.getpid()}")
        file = StreamFile(made, -1, self._failure)
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            file._descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            fcntl.flock(file._descriptor, fcntl.LOCK_EX)
            file.write(claimed)
            if file._descriptor < 0:  # which is logged
                return None
            made.rename(path)
        except OSError as error:
            file.remove()
            self._failure.log(f"a stream gets no file in the run directory: {error}")
            return None
        file._path = path
        return file

    async def take(self, key: str, tenant: str) -> tuple[Claimed, StreamFile] | None:
        """What a frontend has left that is dead: it is this frontend's from now on.

        None if there is nothing, or another's. Raises StreamHeldError while a living frontend has the stream,
        which may be this one.
        """
        if self._directory is None:
            return None
        path = self._directory / key
        descriptor = _opened(path)
        if descriptor < 0:
            return None
        file = StreamFile(path, descriptor, self._failure)
        try:
            is_dead = _lock(path, descriptor)
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            claimed = await asyncio.to_thread(_read, content)  # one frame for each token
            if claimed is not None and _request.decode(claimed.requests[0].request).tenant == tenant:
                if not is_dead:
                    raise StreamHeldError
                return claimed, file
        except (OSError, WireError, LookupError) as error:
            get_logger().error("%s: the stream cannot be read: %r", path, error)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def left(self) -> list[tuple[Path, int]]:
        """The files that dead frontends have left, with their inodes."""
        found = []
        for path in [] if self._directory is None else self._directory.glob("*"):
            if (descriptor := _locked(path)) >= 0:
                found.append((path, os.fstat(descriptor).st_ino))
                os.close(descriptor)
        return found

    def remove(self, left: list[tuple[Path, int]]) -> None:
        """Remove those that were not taken meanwhile."""
        for path, inode in left:
            if (descriptor := _locked(path)) >= 0:
                if os.fstat(descriptor).st_ino == inode:
                    path.unlink(missing_ok=True)
                os.close(descriptor)


def _locked(path: Path) -> int:
    """A descriptor of the file, locked; -1 if there is none, or its frontend lives."""
    descriptor = _opened(path)
    if descriptor >= 0 and not _lock(path, descriptor):
        os.close(descriptor)
        return -1
    return descriptor


def _opened(path: Path) -> int:
    """A descriptor of the file; -1 if there is none."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return -1


def _lock(path: Path, descriptor: int) -> bool:
    """Lock a file; False if its frontend lives, or another one was faster."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(path, descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(content: bytes) -> Claimed | None:
    """The stream as it is after the last whole frame; None without a frame, and for one that has failed.

    Raises WireError.
    """
    frames = _frames(content)
    first = next(frames, None)
    if first is None:
        return None
    claimed = _claimed.decode(first)
    ids = {
        each.request_id: bytearray(each.output_ids) for part in claimed.requests for each in part.sequences
    }
    cached = {each.request_id: each.cached_tokens for part in claimed.requests for each in part.sequences}
    ended = {each.request_id: each for each in claimed.ended}
    for frame in frames:
        update = _update.decode(frame)
        number = update.request_id
        ids[number] += update.output_ids
        cached[number] = cached[number] or update.cached_tokens
        if update.reason in _FAILED:
            return None
        if update.reason >= 0:
            output_ids = bytes(ids[number])
            ended[number] = EndedSequence(
                number, output_ids, update.reason, update.stop_token_id, cached[number]
            )
    requests = [
        ClaimedRequest(
            part.request,
            [
                ClaimedSequence(each.request_id, bytes(ids[each.request_id]), cached[each.request_id])
                for each in part.sequences
                if each.request_id not in ended
            ],
        )
        for part in claimed.requests
    ]
    return Claimed(0, claimed.key, requests, list(ended.values()))


def _frames(content: bytes) -> Iterator[bytes]:
    """All but one that was cut off with its frontend."""
    view = memoryview(content)
    while len(view) >= _LENGTH.size:
        size = _LENGTH.unpack(view[: _LENGTH.size])[0]
        if len(view) < _LENGTH.size + size:
            return
        yield bytes(view[_LENGTH.size : _LENGTH.size + size])
        view = view[_LENGTH.size + size :]
