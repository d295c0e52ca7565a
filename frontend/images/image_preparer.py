"""Makes pixels of the images of a prompt, and its placeholders as many as the images have tokens."""

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import PreparedImage, PromptImage
from frontend.errors import OverloadedError, RequestError, UnavailableError
from frontend.images.image_fetcher import ImageFetcher
from frontend.images.image_parts import ImageSource
from frontend.images.image_process import MAX_PARALLEL, ImageProcess, ImageProcessError

__all__ = ["ImagePreparer", "expanded"]

_RETRY_AFTER_S = 5
_MAX_QUEUED_BYTES = 256 * 1024 * 1024
_MAX_CACHED_BYTES = 128 * 1024 * 1024


class ImagePreparer:
    """Prepares images in a process of its own; those that came lately are kept for the next turns."""

    def __init__(self, process: ImageProcess, settings: ImageSettings, fetcher: ImageFetcher | None = None):
        """`fetcher` is None where sources have no URLs."""
        self.token_id = settings.token_id
        self._process = process
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="images")
        self._queued_bytes = 0
        self._cache: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._cached_bytes = 0

    async def prepare(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """The pixels of each file. Raises RequestError, OverloadedError, UnavailableError."""
        return [await self._prepared(source) for source in sources]

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepared(self, source: ImageSource) -> PreparedImage:
        content = source.content
        if source.url:
            assert self._fetcher is not None, "no source has a URL otherwise"
            content = await self._fetcher.fetch(source.url, source.field)
        key = await asyncio.get_running_loop().run_in_executor(self._threads, _digest, content)
        image = self._cache.get(key)
        if image is None:
            image = await self._new(content)
            if not image.error:
                self._keep(key, image)
        else:
            self._cache.move_to_end(key)
        if image.error:
            raise RequestError(f"'{source.field}': {image.error}", param=source.field)
        return image

    async def _new(self, content: bytes) -> PreparedImage:
        size = len(content)
        if self._queued_bytes and self._queued_bytes + size > _MAX_QUEUED_BYTES:
            raise OverloadedError(
                f"{self._queued_bytes} bytes of images wait to be read; try again later", _RETRY_AFTER_S
            )
        self._queued_bytes += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._process.prepare, content)
        except ImageProcessError as error:
            raise UnavailableError(str(error)) from None
        finally:
            self._queued_bytes -= size

    def _keep(self, key: bytes, image: PreparedImage) -> None:
        if key in self._cache:  # another request with the same file was faster
            return
        self._cache[key] = image
        self._cached_bytes += len(image.pixels)
        while self._cached_bytes > _MAX_CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.pixels)


def expanded(
    ids: Sequence[int], token_id: int, images: Sequence[PreparedImage], most: int
) -> tuple[list[int], list[PromptImage]]:
    """(ids with as many placeholders as each image has tokens, the images where these begin).

    `ids` have one placeholder for each image. Raises RequestError for another number of them, and where there
    would be more than `most` ids.
    """
    count = ids.count(token_id)
    if count != len(images):
        raise RequestError(
            f"the chat template shows {count} of the {len(images)} images of these messages: this model's "
            "template may not take images in all of their roles",
            param="messages",
        )
    total = len(ids) + sum(image.rows * image.columns - 1 for image in images)
    if total > most:
        raise RequestError(
            f"the prompt has {total} tokens with its images, and at most {most} are possible: send fewer or "
            "smaller images, or less text",
            param="messages",
            code="context_length_exceeded",
        )
    found = array("i")
    placed = []
    last = 0
    for image in images:
        place = ids.index(token_id, last)
        found.extend(ids[last:place])
        placed.append(PromptImage(image.key, len(found), image.rows, image.columns, image.pixels))
        found.extend([token_id] * (image.rows * image.columns))
        last = place + 1
    found.extend(ids[last:])
    return found.tolist(), placed


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
