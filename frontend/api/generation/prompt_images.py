"""The images of a request's prompts: prepared after the check of the text, and held until it ends."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from atom.shared.messages.images import PreparedImage
from frontend.api.generation.prompts import Prompt
from frontend.api.schemas.generation import GenerationRequest
from frontend.errors import DeadlineError, OverloadedError, RequestError
from frontend.images.image_preparer import ImagePreparer, expanded
from frontend.text.input_processor import InputProcessor
from frontend.text.text_executor import TextExecutor

__all__ = ["Grids", "PromptImages"]

Grids = Sequence[tuple[int, int]]
"""Rows and columns of the tokens of each image."""

_RETRY_AFTER_S = 5


class PromptImages:
    """For a model that takes images."""

    def __init__(self, preparer: ImagePreparer, inputs: InputProcessor, executor: TextExecutor, limit: int):
        """`limit` is in bytes of pixels, of all requests that have not ended."""
        self._preparer = preparer
        self._inputs = inputs
        self._executor = executor
        self._limit = limit
        self._used = 0

    async def prompts(
        self,
        given: Sequence[Prompt],
        fields: GenerationRequest,
        timeout_s: float | None,
        started: float,
        grids: Grids | None = None,
    ) -> list[Prompt]:
        """The prompts with their images. Raises ApiError; DeadlineError `timeout_s` after `started`.

        `grids` are those of the images of a single prompt, which engines have: no file is read then.
        """
        if fields.truncate_prompt_tokens is not None:
            raise RequestError(
                "'truncate_prompt_tokens' cannot be set for messages with images: leave it out",
                param="truncate_prompt_tokens",
            )
        if grids is not None:
            return [await self._placed(given[0], [PreparedImage(b"", *grid) for grid in grids])]
        left_s = None if timeout_s is None else started + timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return [await self.prompt(each) for each in given]
        except TimeoutError:
            assert timeout_s is not None
            raise DeadlineError(timeout_s) from None

    async def prompt(self, given: Prompt, excess: int = 0) -> Prompt:
        """The prompt with its images; `excess` as in `InputProcessor.encode`. Raises ApiError."""
        if not given.sources:
            return given
        return await self._placed(given, await self._preparer.prepare(given.sources), excess)

    async def _placed(self, given: Prompt, images: Sequence[PreparedImage], excess: int = 0) -> Prompt:
        most = self._inputs.max_model_len + excess
        ids, placed = await self._executor.run(
            len(given.ids) + sum(len(image.pixels) for image in images) // 64,
            lambda: expanded(given.ids, self._preparer.token_id, images, most),
        )
        return dataclasses.replace(given, ids=ids, sources=(), images=placed)

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count so many bytes of pixels. Raises OverloadedError if there is no room."""
        if size and self._used + size > self._limit:
            raise OverloadedError(
                f"images of {self._used} bytes are waiting or running, of {self._limit} that may, and this "
                f"request has {size} more: try again later",
                _RETRY_AFTER_S,
            )
        self._used += size
        try:
            yield
        finally:
            self._used -= size

    def close(self) -> None:
        """End the process that prepares images."""
        self._preparer.close()
