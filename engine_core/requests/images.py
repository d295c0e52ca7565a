"""Which images the workers hold the features of, and the images that a step needs.

The workers compute an image's features once, before the first step that computes one of its tokens, and keep
them for all requests with the same image. They hold as many tokens as the least of them has room for; the
longest unused images give way. A chunk ends before an image for which a step has no room: all images of a
step are held together. Where the tokens of an image see each other, a chunk also ends before an image that it
could only compute in part.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from atom.shared.messages.engine import AddRequest
from atom.shared.messages.images import (
    KEY_BYTES,
    MAX_IMAGES,
    DropImage,
    LoadImage,
    PromptImage,
    RowImage,
)

_START_BYTES = 4


class ImageRegistry:
    """The core's account of the features on every worker."""

    def __init__(self, max_tokens: int = 0, token_bytes: int = 0, sees_ahead: bool = False):
        """Workers hold `max_tokens` tokens, each made of `token_bytes` pixels; 0: they take no images.

        `sees_ahead`: as `ImageSettings.sees_ahead`.
        """
        self.sees_ahead = sees_ahead
        self._max_tokens = max_tokens
        self._token_bytes = token_bytes
        self._held: OrderedDict[bytes, int] = OrderedDict()  # tokens by key, the longest unused first
        self._num_tokens = 0
        self._of_step: set[bytes] = set()
        self._messages: list[LoadImage | DropImage] = []

    def check(self, message: AddRequest) -> None:
        """Raises ValueError, with the reason, for images that can never be computed."""
        if not message.images:
            return
        if not self._max_tokens:
            raise ValueError("this engine takes no images")
        if len(message.images) > MAX_IMAGES:
            raise ValueError(f"{len(message.images)} images are more than {MAX_IMAGES}")
        end = 0
        for image in message.images:
            if image.start < end or image.rows < 1 or image.columns < 1 or len(image.key) != KEY_BYTES:
                raise ValueError("an image has no place in the prompt, or overlaps another")
            end = image.end
            if image.num_tokens > self._max_tokens:
                raise ValueError(f"an image of {image.num_tokens} tokens is larger than {self._max_tokens}")
            if len(image.pixels) != image.num_tokens * self._token_bytes:
                raise ValueError(f"an image of {image.num_tokens} tokens has {len(image.pixels)} bytes")
        if end > message.num_prompt_ids:
            raise ValueError(f"an image ends at {end}, after the prompt of {message.num_prompt_ids} tokens")

    def begin_step(self) -> None:
        """Forget the images of the last step: a new one is planned."""
        self._of_step.clear()

    def reach(self, images: Sequence[PromptImage], start: int, end: int) -> int:
        """Where a chunk of positions start .. end - 1 ends, or earlier; its images are held from now on."""
        for image in images:
            if image.end > start and image.start < end:
                is_cut = self.sees_ahead and image.end > end
                if is_cut or not self._hold(image):
                    return max(image.start, start)
        return end

    def least(self, images: Sequence[PromptImage], start: int) -> int:
        """The fewest tokens that a chunk from `start` on may have, if an image begins there; else 0."""
        if not self.sees_ahead:
            return 0
        return next((image.num_tokens for image in images if image.start == start), 0)

    def take_messages(self) -> list[LoadImage | DropImage]:
        """What to send to every worker, before the step that is planned."""
        messages = self._messages
        self._messages = []
        return messages

    def _hold(self, image: PromptImage) -> bool:
        """Whether the step has room for an image, which is loaded if it is not held."""
        key = image.key
        if key not in self._held:
            if not self._make_room(image.num_tokens):
                return False
            self._held[key] = image.num_tokens
            self._num_tokens += image.num_tokens
            self._messages.append(LoadImage(key, image.rows, image.columns, image.pixels))
        self._held.move_to_end(key)
        self._of_step.add(key)
        return True

    def _make_room(self, tokens: int) -> bool:
        """Drop images that the step does not need until another one fits."""
        unused = [key for key in self._held if key not in self._of_step]
        for key in unused:
            if self._num_tokens + tokens <= self._max_tokens:
                break
            self._num_tokens -= self._held.pop(key)
            self._messages.append(DropImage(key))
        return self._num_tokens + tokens <= self._max_tokens


def row_images(images: Sequence[PromptImage]) -> list[RowImage]:
    """The images of a row, without their pixels."""
    return [RowImage(image.key, image.start, image.rows, image.columns) for image in images]


def block_mark(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """What tells apart the images of blocks with the same ids: keys, and where they begin."""
    marks = []
    first = bisect_right(images, start, key=lambda image: image.end)
    for image in images[first:]:
        if image.start >= end:
            break
        marks.append(image.key + (image.start - start).to_bytes(_START_BYTES, "little", signed=True))
    return b"".join(marks)
