"""Which images the workers hold, and what tells the blocks of two images apart."""

from atom.shared.messages.images import DropImage, LoadImage, PromptImage
from engine_core.requests.images import ImageRegistry, block_mark


def image(name: int, start: int, tokens: int) -> PromptImage:
    return PromptImage(bytes([name] * 16), start, 1, tokens, bytes(tokens))


def sent(registry: ImageRegistry) -> list[tuple[str, int]]:
    """(what, name) of each message."""
    messages = registry.take_messages()
    assert all(isinstance(message, LoadImage | DropImage) for message in messages)
    return [(type(message).__name__, message.key[0]) for message in messages]


def test_an_image_is_loaded_once_and_dropped_for_another() -> None:
    registry = ImageRegistry(10, 1)
    a, b, c = image(1, 2, 6), image(2, 10, 4), image(3, 20, 5)
    registry.begin_step()
    assert registry.reach([a, b, c], 0, 5) == 5
    assert sent(registry) == [("LoadImage", 1)]
    registry.begin_step()
    assert registry.reach([a, b, c], 5, 12) == 12
    assert sent(registry) == [("LoadImage", 2)]
    # The longest unused one gives way.
    registry.begin_step()
    assert registry.reach([b], 10, 14) == 14
    assert registry.reach([a, b, c], 14, 30) == 30
    assert sent(registry) == [("DropImage", 1), ("LoadImage", 3)]


def test_a_chunk_ends_before_an_image_without_room() -> None:
    registry = ImageRegistry(10, 1)
    registry.begin_step()
    assert registry.reach([image(1, 2, 6), image(2, 10, 6)], 0, 20) == 10
    assert registry.reach([image(2, 0, 6)], 2, 20) == 2  # within the image: nothing can be computed
    assert sent(registry) == [("LoadImage", 1)]
    registry.begin_step()
    assert registry.reach([image(2, 0, 6)], 2, 20) == 20
    assert sent(registry) == [("DropImage", 1), ("LoadImage", 2)]


def test_text_before_and_after_images_needs_none() -> None:
    registry = ImageRegistry(10, 1)
    registry.begin_step()
    assert registry.reach([image(1, 8, 4)], 0, 8) == 8
    assert registry.reach([image(1, 8, 4)], 12, 20) == 20
    assert sent(registry) == []


def test_marks_of_blocks() -> None:
    images = [image(1, 3, 6), image(2, 12, 2)]
    marks = [block_mark(images, start, start + 4) for start in range(0, 20, 4)]
    assert marks[4] == b""
    assert [len(mark) for mark in marks] == [20, 20, 20, 20, 0]
    assert len(set(marks[:3])) == 3  # the same image, from other places on
    moved = [image(1, 2, 6)]
    assert block_mark(moved, 0, 4) != marks[0] and block_mark([image(3, 3, 6)], 0, 4) != marks[0]
    assert block_mark(images, 8, 16) == marks[2] + block_mark(images[1:], 8, 16)
