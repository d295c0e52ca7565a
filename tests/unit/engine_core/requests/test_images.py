"""Which images the workers hold, and what tells the blocks of two images apart."""

import pytest

from atom.shared.messages.engine import AddRequest, pack_ids
from atom.shared.messages.images import DropImage, LoadImage, PromptImage
from atom.shared.messages.worker import FullAttentionSpec
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests.images import ImageRegistry, block_mark
from engine_core.requests.token_ids import Prompt
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY


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


def test_a_chunk_ends_before_an_image_whose_tokens_see_each_other() -> None:
    registry = ImageRegistry(100, 1, sees_ahead=True)
    images = [image(1, 2, 6), image(2, 8, 4)]
    registry.begin_step()
    assert [registry.reach(images, 0, end) for end in (2, 7, 8, 11, 12, 20)] == [2, 2, 8, 8, 12, 20]
    assert [registry.least(images, start) for start in (0, 2, 8, 12)] == [0, 6, 4, 0]
    prompt = Prompt(pack_ids(list(range(20))), images=images, sees_ahead=True)
    assert [prompt.uncut(blocks, 1) for blocks in (2, 3, 7, 8, 9, 12, 13)] == [2, 2, 2, 8, 8, 12, 13]
    assert [prompt.uncut(blocks, 5) for blocks in range(5)] == [0, 0, 0, 3, 4]
    others = ImageRegistry(100, 1)
    assert others.reach(images, 0, 7) == 7 and others.least(images, 2) == 0
    assert Prompt(pack_ids(list(range(20))), images=images).uncut(7, 1) == 7


@pytest.mark.parametrize(
    ("prompts", "counts"),
    [
        ([6], [1, 6]),  # more than a mixed step has room for
        ([2, 6], [1, 2]),  # the image waits for a step of its own
        ([2, 1], [1, 2, 1]),
    ],
)
def test_an_image_larger_than_the_room_in_a_mixed_step(prompts: list[int], counts: list[int]) -> None:
    limits = Limits(8, 32, max_num_mixed_tokens=4, long_prefill_token_threshold=3)
    kv = KVCacheManager([FullAttentionSpec(4, 1)], [64], limits.max_chunk, seed=7)
    core = EngineCore(limits, kv, 64, images=ImageRegistry(100, 1, sees_ahead=True))
    core.add(AddRequest([0], pack_ids([1, 2]), 9, GREEDY), b"a")
    assert core.schedule() is not None
    for number, length in enumerate(prompts, 1):
        shown = [image(1, 0, length)] if length != 2 else []
        core.add(AddRequest([number], pack_ids([9] * length), 9, GREEDY, images=shown), b"a")
    batch = core.schedule()
    assert batch is not None and batch.counts == counts
    core.check_integrity()


def test_marks_of_blocks() -> None:
    images = [image(1, 3, 6), image(2, 12, 2)]
    marks = [block_mark(images, start, start + 4) for start in range(0, 20, 4)]
    assert marks[4] == b""
    assert [len(mark) for mark in marks] == [20, 20, 20, 20, 0]
    assert len(set(marks[:3])) == 3  # the same image, from other places on
    moved = [image(1, 2, 6)]
    assert block_mark(moved, 0, 4) != marks[0] and block_mark([image(3, 3, 6)], 0, 4) != marks[0]
    assert block_mark(images, 8, 16) == marks[2] + block_mark(images[1:], 8, 16)
