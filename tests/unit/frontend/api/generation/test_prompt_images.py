"""The images of a prompt: of a new request, and of a stream that is resumed."""

import asyncio
from typing import cast

from frontend.api.generation.prompt_images import PromptImages
from frontend.api.generation.prompts import Prompt
from frontend.api.schemas.generation import GenerationRequest
from frontend.images.image_parts import ImageSource
from frontend.images.image_preparer import ImagePreparer
from frontend.text.input_processor import InputProcessor
from frontend.text.text_executor import TextExecutor

PLACEHOLDER = 9


class GoneFiles:
    """A preparer whose sources cannot be read any more."""

    token_id = PLACEHOLDER

    async def prepare(self, sources: list[ImageSource]) -> None:
        raise AssertionError("a file is read")


class Inputs:
    max_model_len = 100


def test_a_resumed_stream_reads_no_file() -> None:
    executor = TextExecutor()
    preparer, inputs = cast(ImagePreparer, GoneFiles()), cast(InputProcessor, Inputs())
    images = PromptImages(preparer, inputs, executor, limit=1)
    source = ImageSource(b"", "messages", url="https://example.org/gone.png")
    given = Prompt([5, PLACEHOLDER, 6, PLACEHOLDER], sources=[source, source])
    grids = [(1, 2), (2, 2)]
    (prompt,) = asyncio.run(images.prompts([given], GenerationRequest(), 1.0, 0.0, grids))
    assert prompt.ids == [5, *[PLACEHOLDER] * 2, 6, *[PLACEHOLDER] * 4]
    assert prompt.grids == grids and not prompt.sources
