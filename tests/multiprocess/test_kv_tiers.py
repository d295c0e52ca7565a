"""Engines of two ranks whose blocks go to host memory and to disk: ids of transformers in every case."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from atom.shared.messages.engine import CoreStats, KVTierStats
from tests.helpers.checkpoints.reference import MAX_TOKENS, NEW_TOKENS, Reference, make_reference
from tests.helpers.checkpoints.tiny_models import tiny
from tests.helpers.engine.served import ids_of

BLOCK = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def engine(reference: Reference, **options: Any) -> Iterator[LLMEngine]:
    """Blocks for little more than the longest request."""
    with LLMEngine(
        str(reference.directory),
        tensor_parallel_size=2,
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        block_size=BLOCK,
        num_kv_blocks=-(-MAX_TOKENS // BLOCK) + 2,
        **options,
    ) as made:
        yield made


def check_turns(running: LLMEngine, reference: Reference) -> list[int]:
    """Prefix hits after each request: every prompt and its reply again, one after another, twice."""
    hits = []
    for _ in range(2):
        for each in reference.continuations:
            (output,) = running.generate(
                [each.text[:-8]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            )
            assert output["token_ids"] == each.greedy.ids[-8:]
            hits.append(running.stats().prefix_hits)
    return hits


def tiers(stats: CoreStats) -> dict[str, KVTierStats]:
    return {tier.medium: tier for tier in stats.kv_tiers}


def test_ids_with_tiers_damaged_files_and_a_restart(reference: Reference, tmp_path: Path) -> None:
    files = tmp_path / "kv"
    disk = {"kv_offload_dir": str(files), "kv_offload_disk": "1M"}
    with engine(reference, kv_offload_memory="1M", **disk) as running:
        outputs = running.generate(
            reference.prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        )
        assert ids_of(outputs) == reference.ids
        check_turns(running, reference)
        found = tiers(running.stats())
        assert found["CPU"].hits > 0 and found["CPU"].stored > 10 and found["STORAGE"].stored > 10
    ranks = sorted(path for path in files.iterdir() if path.is_dir())
    blocks = sorted(ranks[1].iterdir())
    assert len(ranks) == 2 and len(blocks) == len(list(ranks[0].iterdir()))
    blocks[0].write_bytes(b"damaged")
    blocks[1].unlink()
    (ranks[0] / blocks[2].name).write_bytes(blocks[3].read_bytes())
    with engine(reference, **disk) as running, engine(reference, **disk) as other:
        assert check_turns(running, reference)[2] > 0
        assert check_turns(other, reference)[2] > 0
        found = tiers(running.stats())
        assert found["STORAGE"].hits > 0 and list(found) == ["STORAGE"]


def test_a_full_tier_takes_no_more_space_than_it_may(reference: Reference, tmp_path: Path) -> None:
    """Each file is smaller than a block of the file system."""
    limit = 80 << 10
    with engine(reference, kv_offload_dir=str(tmp_path / "kv"), kv_offload_disk=limit) as running:
        check_turns(running, reference)
        disk = tiers(running.stats())["STORAGE"]
    for rank in range(2):
        files = [file.stat() for file in (tmp_path / "kv").glob(f"*-{rank}/*")]
        assert len(files) > 10 and max(file.st_size for file in files) < 2048
        assert sum(file.st_blocks * 512 for file in files) <= limit
    assert disk.stored > disk.blocks_total
