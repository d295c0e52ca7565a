"""Conversations whose blocks go to tiers and come back: the ids of a run without any cache."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, TierSlots
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.conversations import Conversations, plans
from tests.helpers.engine.whole_engine import WholeEngine
from tests.helpers.servers.fake_redis import fake_redis
from workers.worker import Worker

MODELS = {
    "llama-gqa": ("auto", [18]),
    "llama-fp8": ("fp8", [18]),
    "deepseek-v3.2": ("auto", [18]),
    "gpt-oss": ("auto", [18, 22]),
    "qwen3-next": ("auto", [18, 6]),
}
TURNS = 3
SESSIONS = 3


@pytest.fixture(scope="module", params=sorted(MODELS))
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Worker]]:
    name: str = request.param
    kv_dtype, _ = MODELS[name]
    directory = tmp_path_factory.mktemp("model")
    _, checkpoint = save_tiny(tiny("llama-gqa" if name == "llama-fp8" else name), directory)
    config = engine_config(kv_cache_dtype=kv_dtype)
    files = str(tmp_path_factory.mktemp("kv"))
    cache = dataclasses.replace(config.cache, kv_offload_dir=files, kv_offload_disk=1 << 20)
    worker = Worker(dataclasses.replace(config, cache=cache), checkpoint, place(), lambda *progress: None)
    yield name, worker
    worker.close()


def test_a_few_random_conversations(tmp_path: Path) -> None:
    """`make test-slow` runs 500, on every family."""
    with fake_redis() as store:
        made = Conversations("qwen3-next", tmp_path, store)

        @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(plans)
        def run(plan: tuple[tuple[int, int, int], list[tuple[str, Any]]]) -> None:
            made.run(plan)

        run()
        made.close()


@pytest.mark.parametrize(
    ("name", "blocks"), [("llama-gqa", [18]), ("qwen3-next", [18, 6])], ids=["texts", "texts and states"]
)
def test_drafts_of_texts_come_back_too(tmp_path: Path, name: str, blocks: list[int]) -> None:
    """The texts as if no block had been evicted, and of a slot with states after drafts the first one."""
    _, checkpoint = save_tiny(tiny(name), tmp_path)
    speculative = SpeculativeConfig("ngram", 3, 1, 1, spec_decode_adaptive=False)
    config = dataclasses.replace(engine_config(), speculative=speculative)
    worker = Worker(config, checkpoint, place(), lambda *progress: None)
    large = WholeEngine(worker, [200] * len(blocks), max_tokens=64)
    expected = converse(large)
    engine = WholeEngine(worker, blocks, max_tokens=64, tiers=tiers_of(blocks, HOST_MEMORY))
    assert converse(engine) == expected
    stats = engine.core.stats()
    assert stats.kv_tiers[0].loaded > 0
    assert stats.num_draft_tokens == large.core.stats().num_draft_tokens > 5
    worker.close()


def test_states_of_a_draft_model_come_back_too(tmp_path: Path) -> None:
    """It drafts as if nothing had been evicted: the same drafts are accepted, which are its own."""
    _, checkpoint = save_tiny(tiny("qwen3.5"), tmp_path)
    speculative = SpeculativeConfig(
        "draft_model", 3, draft_model=checkpoint.directory, spec_decode_adaptive=False
    )
    config = dataclasses.replace(engine_config(), speculative=speculative)
    worker = Worker(config, checkpoint, place(), lambda *progress: None)
    large = WholeEngine(worker, 200, max_tokens=64)
    expected = converse(large)
    blocks = [18, 6, 18, 6]
    engine = WholeEngine(worker, blocks, max_tokens=64, tiers=tiers_of(blocks, HOST_MEMORY))
    assert converse(engine) == expected
    stats, unlimited = engine.core.stats(), large.core.stats()
    assert stats.kv_tiers[0].loaded > 0
    assert stats.num_accepted_tokens_per_pos == unlimited.num_accepted_tokens_per_pos
    assert sum(stats.num_accepted_tokens_per_pos) > 0.9 * stats.num_draft_tokens > 5
    worker.close()


def converse(engine: WholeEngine) -> list[list[int]]:
    """The ids of all turns: each session sends all before and some new ids, after the others' turns."""
    prompts = [prompt_of(17, 0) + prompt_of(9, 1 + session) for session in range(SESSIONS)]
    found = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            number = turn * SESSIONS + session
            engine.add(number, prompts[session], 5)
            engine.run()
            if engine.kv.offload is not None:
                engine.finish_copies()
            ids = engine.outputs[number].token_ids
            found.append(ids)
            prompts[session] = prompts[session] + ids + prompt_of(6, number)
    return found


def tiers_of(num_blocks: list[int], *media: str) -> list[TierSlots]:
    return [TierSlots(medium, [200] * len(num_blocks)) for medium in media]


def test_ids_equal_a_run_without_cache(made: tuple[str, Worker]) -> None:
    """With both tiers, then in a later start that has the disk's blocks alone."""
    name, worker = made
    blocks = MODELS[name][1]
    expected = converse(WholeEngine(worker, [200] * len(blocks), max_tokens=64, caching=False))
    engine = WholeEngine(worker, blocks, max_tokens=64, tiers=tiers_of(blocks, HOST_MEMORY, DISK))
    assert converse(engine) == expected
    memory, disk = engine.core.stats().kv_tiers
    assert memory.loaded > 0 and memory.hits > 0 and memory.failed == 0
    assert disk.stored > 20 and disk.failed == 0
    later = WholeEngine(worker, blocks, max_tokens=64, tiers=tiers_of(blocks, DISK))
    assert later.kv.offload is not None and later.kv.offload.adopt([worker.stored]) > 20
    assert converse(later) == expected
    (disk,) = later.core.stats().kv_tiers
    assert disk.hits > 0 and disk.failed == 0
    # Blocks that have left a window before the end of a sequence are not stored.
    assert (later.outputs[0].cached_tokens > 0) is (name != "gpt-oss")
