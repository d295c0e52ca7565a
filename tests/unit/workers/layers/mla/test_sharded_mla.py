"""Ranks that split the latent cache by tokens: the outputs of one worker, what each stores and exchanges."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom_ops import LatentLayer
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import BLOCK_SIZE, BLOCKS, TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import RankedWorkers
from workers.layers.mla import sharded_mla

LAYOUTS = [("deepseek-v3", 2, 2), ("deepseek-v2-lite", 4, 2), ("deepseek-v3-biases-halves-tied", 4, 4)]
PROMPTS = [prompt_of(length, length) for length in (64, 5, 1, 37)]
IDS = prompt_of(50, seed=3)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]}-tp{layout[1]}-dcp{layout[2]}")
def ranked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RankedWorkers]:
    name, tp, dcp = request.param
    save_tiny(tiny(name), tmp_path)
    made = RankedWorkers(tmp_path, tp, dcp)
    yield made
    made.close()


def test_outputs_are_those_of_one_worker(ranked: RankedWorkers, tmp_path: Path) -> None:
    """Chunks, decodes and whole prompts in one step, and logits at every position of a prompt in chunks."""
    alone = TinyWorker(tmp_path)
    wanted = generate(alone.core(), alone.execute, PROMPTS, 12, chunk=24, stagger=2)
    assert generate(ranked.core(), ranked.execute, PROMPTS, 12, chunk=24, stagger=2) == wanted
    core = alone.core()
    core.add(0, IDS)
    wanted_TV = forced_logits(alone.worker, core, 0, [20, 1, 29])

    def logits(rank: int) -> torch.Tensor:
        core = ranked.workers[rank].core()
        core.add(0, IDS)
        return forced_logits(ranked.workers[rank].worker, core, 0, [20, 1, 29])

    for found_TV in ranked.on_all(logits):
        torch.testing.assert_close(found_TV, wanted_TV, atol=2e-5, rtol=0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankedWorkers]:
    save_tiny(tiny("deepseek-v3"), tmp_path)
    made = RankedWorkers(tmp_path, 2, 2)
    yield made
    made.close()


def test_a_rank_stores_its_tokens_and_exchanges_queries_and_results(
    pair: RankedWorkers, tmp_path: Path
) -> None:
    """A whole prompt needs no collective of the group; a decode one of each kind in each layer."""
    layers, width = 3, 32 + 16
    core = pair.core()
    core.add(0, prompt_of(9, 9))
    for calls in (comm.calls for comm in pair.dcp):
        calls.clear()
    core.add_sampled(pair.execute(core.plan({0: 9})))
    assert all(comm.calls == {} for comm in pair.dcp)
    core.add_sampled(pair.execute(core.plan({0: 1})))
    assert all(comm.calls == {"all_gather": layers, "all_to_all": layers} for comm in pair.dcp)
    alone = TinyWorker(tmp_path).loaded.kv_specs[0]
    for rank, made in enumerate(pair.workers):
        (spec,) = made.loaded.kv_specs
        assert (spec.block_size, spec.bytes_per_block) == (2 * BLOCK_SIZE, alone.bytes_per_block)
        caches = made.worker._runner._kv_layers
        assert sum(cache.rows.nbytes for cache in caches) == BLOCKS * spec.bytes_per_block
        assert spec.bytes_per_block == layers * BLOCK_SIZE * width * 4
        # 10 computed tokens: positions 0, 2, … on rank 0; 1, 3, … on rank 1. The warm-up used blocks, too.
        cache = caches[0]
        assert isinstance(cache, LatentLayer) and cache.shard.rank == rank
        (blocks,) = core._owned[0]
        stored = cache.rows[blocks].flatten(0, 1).abs().sum(1) > 0
        assert stored[:5].all() and len(stored) == 2 * BLOCK_SIZE


def test_heads_are_gathered_in_parts_where_they_are_many(
    pair: RankedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ids with one head of each rank at a time, which bounds the memory of long chunks."""

    def run() -> tuple[list[list[int]], int]:
        calls = pair.dcp[0].calls
        calls.clear()
        return generate(pair.core(), pair.execute, PROMPTS[:2], 4, chunk=24), calls["all_to_all"]

    wanted, together = run()
    monkeypatch.setattr(sharded_mla, "_MOST_GATHERED", 1)
    assert run() == (wanted, 2 * together)
