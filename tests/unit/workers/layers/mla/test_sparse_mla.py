"""Sparse MLA: index keys in the cache, layers that share indices, and contexts of at most top-k tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workers.layers.mla.sparse_mla
from atom.shared.messages.worker import AllocateKV, FullAttentionSpec
from atom_ops import LatentLayer
from tests.helpers.checkpoints.tiny_models import (
    Tiny,
    checkpoint_of,
    engine_config,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.teacher_forcing import BLOCKS, TinyWorker, forced_logits
from workers.layers.attention.cache_groups import LatentGroup
from workers.memory.kv_cache import allocate_kv, kv_specs
from workers.models.glm_moe_dsa import indexer_kinds
from workers.worker import Worker

CPU = torch.device("cpu")


def changed(name: str, **config: Any) -> Tiny:
    row = tiny(name)
    return replace(row, config=row.config | config)


def loaded(row: Tiny, directory: Path) -> TinyWorker:
    save_tiny(row, directory)
    return TinyWorker(directory)


def test_bytes_of_a_token_in_deepseek_v32() -> None:
    """Latent and RoPE key have 576 numbers, an index key 128, in each of 61 layers."""
    layers = range(61)
    (spec,) = kv_specs([LatentGroup(layers, 512, 64, 128, layers)], 16, torch.bfloat16)
    assert spec == FullAttentionSpec(16, 16 * 61 * 2 * (576 + 128))
    (spec,) = kv_specs([LatentGroup(layers, 512, 64, 128, layers)], 16, torch.float8_e4m3fn)
    assert spec.bytes_per_block == 16 * 61 * (576 + 4 + 128 + 4)


def test_only_layers_with_an_indexer_cache_index_keys() -> None:
    group = LatentGroup(range(4), 40, 8, 20, [0, 2])
    layers = allocate_kv([group], [3], 4, torch.float32, CPU)
    made = [layer.index for layer in layers if isinstance(layer, LatentLayer)]
    assert [index is not None for index in made] == [True, False, True, False]
    held = sum(layer.rows.nbytes for layer in layers if isinstance(layer, LatentLayer))
    held += sum(index.keys.nbytes for index in made if index is not None)
    assert kv_specs([group], 4, torch.float32)[0].bytes_per_block * 3 == held


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_short_contexts_need_no_scores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scores up to index_topk tokens; beyond, once for each layer with an indexer."""
    calls = []
    choose = workers.layers.mla.sparse_mla.index_topk

    def counted(*args: Any) -> Any:
        calls.append(args)
        return choose(*args)

    worker = loaded(changed(name, index_topk=40), tmp_path)
    monkeypatch.setattr(workers.layers.mla.sparse_mla, "index_topk", counted)
    ids = prompt_of(60, 3)
    core = worker.core()
    core.add(0, ids)
    forced_logits(worker.worker, core, 0, [39, 1])
    assert not calls
    forced_logits(worker.worker, core, 0, [1])
    assert len(calls) == 3, "in each of three layers, or in three of four"


def test_long_contexts_differ_from_full_attention(tmp_path: Path) -> None:
    """Contexts longer than index_topk differ from full attention; shorter ones are equal."""
    found = []
    for count in (16, 200):
        directory = tmp_path / str(count)
        worker = loaded(changed("glm-5", index_topk=count), directory)
        core = worker.core()
        core.add(0, prompt_of(60, 3))
        found.append(forced_logits(worker.worker, core, 0, [60]))
    torch.testing.assert_close(found[0][:16], found[1][:16], atol=1e-4, rtol=0)
    assert (found[0][30:] - found[1][30:]).abs().amax(1).min() > 1e-2


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, "FFFSSF"),
        ({"index_topk_pattern": "FSSFSS"}, "FSSFSS"),
        ({"index_topk_pattern": ["full", "shared"] * 3}, "FSFSFS"),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_freq": 2}, "FSSSSS"),
    ],
)
def test_layers_that_share_indices(config: dict[str, Any], kinds: str) -> None:
    found = indexer_kinds({"num_hidden_layers": 6, **config})
    assert "".join(kind[0].upper() for kind in found) == kinds


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "the first layer has no indexer"),
        ({"indexer_types": ["full"]}, "full or shared for each of 4 layers"),
        ({"index_topk_pattern": "FSXS"}, "full or shared for each of 4 layers"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave False is not supported"),
        ({"rope_interleave": False}, "rope_interleave False is not supported"),
        ({"q_lora_rank": None}, "an indexer without q_lora_rank is not supported"),
    ],
)
def test_unsupported_configurations_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_tiny(tiny("glm-5"), tmp_path)
    checkpoint = checkpoint_of(tmp_path)
    stated = {k: v for k, v in checkpoint.hf_config.items() if k != "indexer_types"} | config
    worker = Worker(engine_config(), replace(checkpoint, hf_config=stated), place(), lambda *progress: None)
    with pytest.raises(ValueError, match=words):
        worker.load()


def test_fp8_kv_cache_changes_little(tmp_path: Path) -> None:
    save_tiny(tiny("deepseek-v3.2"), tmp_path)
    worker = Worker(
        engine_config(block_size=4, kv_cache_dtype="fp8"),
        checkpoint_of(tmp_path), place(), lambda *progress: None,
    )  # fmt: skip
    (spec,) = worker.load().kv_specs
    assert spec.bytes_per_block == 4 * 3 * (48 + 4 + 20 + 4)
    worker.allocate(AllocateKV([BLOCKS], 256))
    exact = TinyWorker(tmp_path)
    ids, found = prompt_of(16, 5), []
    for one in (worker, exact.worker):
        core = exact.core()
        core.add(0, ids)
        found.append(forced_logits(one, core, 0, [16]))
    difference = (found[0] - found[1]).abs()
    assert 1e-4 < difference.mean() < 0.2
