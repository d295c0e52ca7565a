"""Images in a whole engine: chunks, prefix cache, eviction, preemption, drafts, recorded steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import AddRequest, Sampling, pack_ids
from atom.shared.messages.images import PromptImage
from tests.helpers.checkpoints.mtp_models import save_vision_mtp_model
from tests.helpers.checkpoints.tiny_models import checkpoint_of, engine_config, place
from tests.helpers.checkpoints.vision_models import (
    Processed,
    build,
    hf_follows,
    picture,
    processed,
    prompt,
    save,
)
from tests.helpers.engine.core_driver import GREEDY
from tests.helpers.engine.drafting import accepted_share, recorded
from tests.helpers.engine.whole_engine import WholeEngine
from workers.worker import Worker

COUNT = 10
WIDE, OTHER = (picture(90, 33, seed) for seed in (0, 1))
TALL, SMALL = (picture(*size) for size in ((20, 70), (16, 17)))
LOOK, WHY = [5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]
SEEDS = {"kimi_k25": 2}
"""Where that of the others generates a placeholder."""

Part = bytes | list[int]
"""The file of an image, or ids."""
ALL = 1 << 10

each = pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "gemma3"])


class Tiny(NamedTuple):
    directory: Path
    groups: int
    model: Any
    model_type: str = "qwen3_5"

    def engine(
        self,
        blocks: int = 400,
        budget: int = 16,
        image_tokens: int = ALL,
        speculative: SpeculativeConfig | None = None,
        capture_sizes: str = "[]",
    ) -> WholeEngine:
        config = engine_config()
        device = replace(
            config.device, cudagraph_capture_sizes=capture_sizes, cudagraph_mode="FULL_DECODE_ONLY"
        )
        config = replace(config, device=device, speculative=speculative or config.speculative)
        worker = Worker(config, checkpoint_of(self.directory), place(), lambda *progress: None)
        return WholeEngine(worker, [blocks] * self.groups, budget, image_tokens=image_tokens)

    def shown(self, *parts: Part) -> list[Processed]:
        """The images among the parts."""
        return [processed(part, self.model_type) for part in parts if isinstance(part, bytes)]

    def prompt(self, *parts: Part) -> tuple[list[int], list[PromptImage]]:
        return prompt(*(part if isinstance(part, list) else self.shown(part)[0] for part in parts))

    def add(self, engine: WholeEngine, number: int, *parts: Part, n: int = 1, **fields: Any) -> None:
        ids, images = self.prompt(*parts)
        engine.add(number, ids, COUNT, n=n, images=images, **fields)

    def follows(self, output: list[int], *parts: Part) -> list[int]:
        """`output` if transformers continues the prompt so."""
        assert len(output) == COUNT
        return hf_follows(self.model, self.prompt(*parts)[0], self.shown(*parts), output)


Saved = Callable[[str], Tiny]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def make(model_type: str) -> Tiny:
        model, directory = build(model_type, SEEDS.get(model_type, 1)), tmp_path_factory.mktemp(model_type)
        save(model, directory)
        return Tiny(directory, 1 + (model_type in ("qwen3_5", "gemma3")), model, model_type)

    return make


def check(tiny: Tiny, engine: WholeEngine, requests: Sequence[Sequence[Part]]) -> None:
    """Run the requests, numbered from 0, and compare what they generate."""
    engine.run()
    for number, parts in enumerate(requests):
        output = engine.outputs[number]
        assert not output.error
        assert output.token_ids == tiny.follows(output.token_ids, *parts)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "gemma3", "kimi_k25"])
def test_a_batch_in_chunks_and_its_prefixes(model_type: str, saved: Saved) -> None:
    tiny = saved(model_type)
    engine = tiny.engine(budget=24 if model_type == "gemma3" else 16)
    first, text, other = (LOOK, WIDE, WHY, TALL, SMALL, LOOK), (LOOK, WHY), (LOOK, OTHER, WHY)
    tiny.add(engine, 0, *first, n=2)
    tiny.add(engine, 2, *text)
    tiny.add(engine, 3, *other)
    check(tiny, engine, [first, first, text, other])
    assert engine.num_encoded == 4
    # The same ids stand for another image: nothing but the text before it is shared.
    assert engine.outputs[3].cached_tokens < len(LOOK)
    # Within a block the image is followed by other text: the cached prefix ends inside the image.
    changed = (LOOK, WIDE, LOOK)
    tiny.add(engine, 4, *changed)
    check(tiny, engine, [first, first, text, other, changed])
    place = len(LOOK) + 1
    if model_type == "qwen3_vl":
        assert place < engine.outputs[4].cached_tokens < place + tiny.shown(WIDE)[0].num_tokens
    if model_type == "gemma3":  # whose images are computed as a whole
        assert engine.outputs[4].cached_tokens == place // 4 * 4
    assert engine.num_encoded == 4


@each
def test_more_images_than_the_workers_hold(model_type: str, saved: Saved) -> None:
    tiny = saved(model_type)
    largest = max(image.num_tokens for image in tiny.shown(WIDE, TALL, SMALL))
    engine = tiny.engine(budget=64, image_tokens=largest)
    requests = [(LOOK, WIDE, WHY), (TALL, WIDE, LOOK), (WHY, SMALL, TALL, SMALL)]
    for number, parts in enumerate(requests):
        tiny.add(engine, number, *parts)
    check(tiny, engine, requests)
    assert len(engine._worker._images._features) <= 3


@each
def test_preemption(model_type: str, saved: Saved) -> None:
    tiny = saved(model_type)
    parts = (LOOK, SMALL, WHY)
    length = len(tiny.prompt(*parts)[0])
    engine = tiny.engine(blocks=3 * -(-(length + 1) // 4) + 1, budget=64)
    for number in range(3):
        tiny.add(engine, number, [20 + number], *parts)
    check(tiny, engine, [([20 + number], *parts) for number in range(3)])
    assert engine.core.stats().preemptions


@each
@pytest.mark.parametrize("drafts", [False, True])
def test_drafts_and_recorded_steps(drafts: bool, model_type: str, saved: Saved) -> None:
    tiny = saved(model_type)
    method = SpeculativeConfig("ngram", 3, 4, 1) if drafts else None
    engine = tiny.engine(budget=64, speculative=method, capture_sizes="[1,2,4]")
    requests = [(LOOK, WIDE, WHY), (WHY, LOOK), (SMALL, LOOK, TALL)]
    for number, parts in enumerate(requests):
        tiny.add(engine, number, *parts)
    check(tiny, engine, requests)


@pytest.mark.parametrize(("drafts", "capture"), [(1, "[]"), (3, "[1,2,4]")])
def test_drafts_of_multi_token_prediction(
    drafts: int, capture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens are those of the run without drafts, many of which are right."""
    directory = tmp_path_factory.mktemp("mtp")
    save_vision_mtp_model(directory)
    tiny = Tiny(directory, 2, None)
    requests = [(LOOK, WIDE, WHY, TALL), (WHY, LOOK), (SMALL, LOOK, OTHER, WHY)]
    found = []
    for method in (None, SpeculativeConfig("mtp", drafts, spec_decode_adaptive=False)):
        engine = tiny.engine(budget=32, speculative=method, capture_sizes=capture)
        for number, parts in enumerate(requests):
            tiny.add(engine, number, *parts)
        engine.run()
        assert not any(engine.outputs[number].error for number in range(3))
        found.append([engine.outputs[number].token_ids for number in range(3)])
    assert found[0] == found[1]
    assert accepted_share(engine) > 0.3


def test_drafts_with_images_are_those_of_the_definition(tmp_path: Path) -> None:
    model = save_vision_mtp_model(tmp_path, strong=True)
    tiny = Tiny(tmp_path, 2, None)
    engine = tiny.engine(budget=96, speculative=SpeculativeConfig("mtp", 3, spec_decode_adaptive=False))
    drafted = recorded(engine)
    tiny.add(engine, 0, *(parts := (LOOK, WIDE, WHY, TALL, LOOK)))
    ids, _ = tiny.prompt(*parts)
    engine.run()
    text = [*ids, *engine.outputs[0].token_ids]
    for position, drafts in drafted:
        usable = max(min(3, len(text) - 2 - position), 0)
        with torch.no_grad():
            wanted = model.drafts(text[: position + 1], tiny.shown(WIDE, TALL), usable)
        assert drafts[:usable] == wanted, position


def test_sampled_with_a_seed_in_any_batch(saved: Saved) -> None:
    tiny = saved("qwen3_vl")
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    found = []
    for others in (0, 2):
        engine = tiny.engine(budget=32)
        for other in range(others):
            tiny.add(engine, 1 + other, [other + 3], WIDE)
        tiny.add(engine, 0, LOOK, TALL, WHY, sampling=sampling)
        engine.run()
        found.append(engine.outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"start": 200}, "after the prompt"),
        ({"key": b"short"}, "no place"),
        ({"pixels": b"123"}, "has 3 bytes"),
        ({"rows": 1 << 20}, "larger than"),
    ],
)
def test_an_image_that_does_not_fit_its_request(change: dict[str, Any], error: str, saved: Saved) -> None:
    """Such a request fails alone."""
    tiny = saved("qwen3_vl")
    engine = tiny.engine()
    ids, images = tiny.prompt(LOOK, SMALL)
    image = msgspec.structs.replace(images[0], **change)
    refusal = engine.core.add(AddRequest([0], pack_ids(ids), COUNT, GREEDY, images=[image]), b"a")
    assert refusal is not None and error in refusal.finished[0].message
