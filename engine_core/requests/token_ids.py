"""Token ids: the prompt that the sequences of one request share, and the output of each sequence."""

import hashlib
from array import array
from collections.abc import Sequence

from atom.shared.messages.engine import unpack_ids
from atom.shared.messages.images import PromptImage

_SALT_MARK = bytes(8)
"""Precedes every salt, so that a salted root is longer than a digest."""
_PLACE_BYTES = 8


class Prompt:
    """The prompt's ids and what is derived from them, once for all sequences."""

    __slots__ = (
        "_distinct",
        "_distinct_ids",
        "_distinct_until",
        "digests",
        "hash_inputs",
        "ids",
        "images",
        "root",
        "sees_ahead",
    )

    def __init__(
        self, packed: bytes, salt: str = "", images: Sequence[PromptImage] = (), sees_ahead: bool = False
    ):
        """`images` by their start; `sees_ahead`: as `ImageSettings.sees_ahead`.

        Raises ValueError for bytes that are not a whole number of ids.
        """
        self.ids = unpack_ids(packed)
        self.images = images
        self.sees_ahead = sees_ahead
        self.root = _SALT_MARK + salt.encode("utf-8", "surrogatepass") if salt else b""
        """Hashed with the first block, in place of a previous block's digest."""
        self.digests: list[bytes] = []
        """Digests of the prompt's full blocks, as far as they are hashed."""
        self.hash_inputs: list[bytes] = []
        """What each digest is computed from: the previous block's digest, the marks of images, the ids."""
        self._distinct: set[int] = set()
        self._distinct_ids: array[int] = array("i")
        self._distinct_until = 0

    def collect_distinct(self, count: int) -> None:
        """Scan up to `count` more ids for `distinct_ids`."""
        end = min(self._distinct_until + count, len(self.ids))
        new = set(self.ids[self._distinct_until : end]) - self._distinct
        self._distinct |= new
        self._distinct_ids.extend(new)
        self._distinct_until = end
        if end == len(self.ids):
            self._distinct = set()

    def uncut(self, blocks: int, block_size: int) -> int:
        """The most blocks, up to this many, whose end cuts no image that one step has to compute."""
        if self.sees_ahead:
            for image in reversed(self.images):  # a block before one may end in an earlier one
                if image.start < blocks * block_size < image.end:
                    blocks = image.start // block_size
        return blocks

    @property
    def is_marked(self) -> bool:
        """Whether ids alone do not tell its blocks from those of others: it has a salt, or images."""
        return bool(self.root or self.images)

    @property
    def last_digest(self) -> bytes:
        """What the next block is hashed with: the digest of the last hashed block, or the root."""
        return self.digests[-1] if self.digests else self.root

    @property
    def num_left(self) -> int:
        """Ids that `collect_distinct` has not scanned."""
        return len(self.ids) - self._distinct_until

    @property
    def num_distinct(self) -> int:
        """Ids collected so far."""
        return len(self._distinct_ids)

    def distinct_ids(self) -> bytes:
        """Each id of the prompt once, packed; complete when `num_left` is 0."""
        return self._distinct_ids.tobytes()


class TokenIds:
    """All known ids of one sequence."""

    __slots__ = ("output", "prompt", "prompt_length")

    def __init__(self, prompt: Prompt, output: bytes = b""):
        """`output` holds the packed ids that an earlier run of the request has generated."""
        self.prompt = prompt
        self.prompt_length = len(prompt.ids)
        self.output: array[int] = unpack_ids(output)

    def __len__(self) -> int:
        return self.prompt_length + len(self.output)

    def packed(self, start: int, end: int) -> bytes:
        """The ids of positions start .. end - 1."""
        length = self.prompt_length
        if start >= length:
            return self.output[start - length : end - length].tobytes()
        prompt = self.prompt.ids
        if end <= length:
            return prompt[start:end].tobytes()
        return (prompt[start:] + self.output[: end - length]).tobytes()

    def content(self, end: int) -> bytes:
        """SHA-256 of the salt, the ids before `end` and their images: equal in all servers, unlike digests.

        Servers have seeds of their own for digests, which are short enough to collide where seeds are known.
        """
        prompt = self.prompt
        found = hashlib.sha256(hashlib.sha256(prompt.root).digest())
        for image in prompt.images:
            if image.start < end:
                place = image.start, image.rows, image.columns
                found.update(image.key + b"".join(each.to_bytes(_PLACE_BYTES, "little") for each in place))
        found.update(self.packed(0, end))
        return found.digest()
