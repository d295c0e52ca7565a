"""A KV tier in a Redis or Valkey server, which servers of several hosts share.

    atom-kv:seed                             of digests, for all who use the database
    atom-kv:FINGERPRINT-RANK:GROUP-DIGEST    a block, as in a file (`workers.memory.block_file`)

A server that is gone, slow, full or damaged costs the blocks that it has, and one log line a minute. After an
exchange that failed, none is begun for a while: all is missing then.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import RareWarning
from atom.shared.utils.redis_client import KEY_PREFIX, Command, RedisClient, RedisError, agreed_seed
from workers.memory.block_file import HEADER_BYTES, DamagedBlockError, block_header, check_block

__all__ = ["RemoteTier"]

_EXCHANGE_S = 2.0
"""What an exchange of `_PART_BYTES` may take."""
_PART_BYTES = 16 << 20
_PAUSE_S = 10.0
_DIGEST_BYTES = 8

Replies = list[bytes | int | Exception | None]


class RemoteTier:
    """The blocks of one rank. Only the thread of the tier uses it."""

    part_bytes = 128 << 20
    """Many blocks for each round trip."""

    is_two_way = False  # it has one connection

    def __init__(self, client: RedisClient, name: str, num_groups: int, seed: int):
        """`name`: of the cache and the rank; `num_groups`: KV groups; `seed`: that of the digests."""
        self._client = client
        self._prefix = f"{KEY_PREFIX}{name}:"
        self._num_groups = num_groups
        self._seed = seed
        self._warning = RareWarning()
        self._paused_until = 0.0

    def present(self, digests: bytes) -> list[bytes]:
        """For each KV group and each digest of 8 bytes: 1 if the server has the block, else 0."""
        each = [digests[start : start + _DIGEST_BYTES] for start in range(0, len(digests), _DIGEST_BYTES)]
        commands = [
            ("EXISTS", self._key(group, digest)) for group in range(self._num_groups) for digest in each
        ]
        replies = self._exchange(commands)
        found = bytes(reply == 1 for reply in replies)
        return [found[start : start + len(each)] for start in range(0, len(found), len(each))]

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Store rows of bytes unless the server has them; returns the failed ones. Waits for the device."""
        replaced = [("UNLINK", self._key(group, copy.replaced)) for copy in copies if copy.replaced]
        present = [("TOUCH", self._key(group, copy.digest)) for copy in copies]
        touched = self._exchange([*replaced, *present])[len(replaced) :]
        failed = [index for index, reply in enumerate(touched) if not isinstance(reply, int)]
        new = [index for index, reply in enumerate(touched) if reply == 0]
        rows = rows_NS.cpu().numpy()
        for part in _parts(new, rows_NS.shape[1]):
            replies = self._exchange([self._set(group, copies[index], rows[index]) for index in part])
            for index, reply in zip(part, replies, strict=True):
                if reply != b"OK":
                    failed.append(index)
                    self._warn_refused(reply)
        return failed

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Read blocks to rows of bytes; returns the failed ones, which are removed if they are damaged."""
        found = torch.empty(rows_NS.shape, dtype=torch.uint8, pin_memory=rows_NS.is_cuda)
        rows = found.numpy()
        failed = []
        damaged: list[Command] = []
        for part in _parts(range(len(copies)), rows_NS.shape[1]):
            commands: list[Command] = [("GET", self._key(group, copies[index].digest)) for index in part]
            expected = sum(HEADER_BYTES + len(copies[index].hash_input) + rows.shape[1] for index in part)
            for index, reply in zip(part, self._exchange(commands, expected), strict=True):
                try:
                    if _is_block(reply, copies[index].hash_input, rows[index]):
                        continue
                except DamagedBlockError as error:
                    damaged.append(("UNLINK", self._key(group, copies[index].digest)))
                    self._warning.log(
                        f"a KV block is damaged, and is computed again: {self._client}: {error}"
                    )
                failed.append(index)
                self._warn_refused(reply)
        self._exchange(damaged)
        rows_NS.copy_(found)
        return failed

    def _key(self, group: int, digest: bytes) -> str:
        return f"{self._prefix}{group}-{digest.hex()}"

    def _set(self, group: int, copy: BlockCopy, row_S: NDArray[np.uint8]) -> Command:
        content = np.ascontiguousarray(row_S).data
        return (
            "SET",
            self._key(group, copy.digest),
            b"".join((block_header(copy.hash_input, content), content)),
        )

    def _exchange(self, commands: Sequence[Command], value_bytes: int = 0) -> Replies:
        """The reply to each command; an exception for each that the server refused or did not answer."""
        if not commands:
            return []
        replies: Replies = []
        problem: Exception = RedisError("it failed a moment ago")
        if time.monotonic() >= self._paused_until:
            try:
                if not self._client.is_open:
                    self._open()
                replies += self._client.exchange(commands, value_bytes, _EXCHANGE_S)
            except RedisError as error:
                problem = error
                self._paused_until = time.monotonic() + _PAUSE_S
                self._warning.log(
                    f"--kv-offload-remote-url: {error}: blocks that are there are computed, none is stored"
                )
        return [*replies, *[problem] * (len(commands) - len(replies))]

    def _open(self) -> None:
        if agreed_seed(self._client, self._seed) != self._seed:
            self._warning.log(
                f"--kv-offload-remote-url: {self._client} has blocks under other digests, because it was not "
                "reached when this engine started: restart this engine to find them"
            )

    def _warn_refused(self, reply: bytes | int | Exception | None) -> None:
        if isinstance(reply, Exception) and not isinstance(reply, RedisError):
            text = one_line(reply, type(reply))
            self._warning.log(f"--kv-offload-remote-url: {self._client} refuses KV blocks: {text}")


def _is_block(reply: object, hash_input: bytes, row_S: NDArray[np.uint8]) -> bool:
    """Copy a block to its row; False if there is none. Raises DamagedBlockError."""
    if not isinstance(reply, bytes):
        return False
    start = HEADER_BYTES + len(hash_input)
    if len(reply) != start + len(row_S):
        raise DamagedBlockError(f"it has {len(reply)} bytes, not {start + len(row_S)}")
    content = memoryview(reply)
    check_block(reply[:start], hash_input, content[start:])
    row_S[:] = np.frombuffer(content[start:], np.uint8)
    return True


def _parts(indices: Sequence[int], num_bytes: int) -> Iterator[Sequence[int]]:
    """As many as one exchange has, of blocks of `num_bytes`."""
    count = max(1, _PART_BYTES // num_bytes)
    for start in range(0, len(indices), count):
        yield indices[start : start + count]
