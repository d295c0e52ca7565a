"""A plan on the meta device agrees with what a worker reports once its weights are loaded."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.plan import PlanLaunch, RankPlan
from atom.shared.messages.worker import FullAttentionSpec, Loaded, RecurrentStateSpec, SlidingWindowSpec
from engine_core.startup import plan_cache
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.helpers.checkpoints.fp8 import FP8_MODELS, save_fp8
from tests.helpers.checkpoints.mxfp4 import save_mxfp4
from tests.helpers.checkpoints.tiny_models import (
    TINY_MODELS,
    checkpoint_of,
    engine_config,
    save_tiny,
    tiny,
)
from tests.helpers.source import ROOT
from workers.checkpoint.hf_directory import read_directory
from workers.memory.plan_memory import plan
from workers.worker import Worker

FAMILIES = list({model.model_type: model.name for model in reversed(TINY_MODELS)}.values())
"""The first tiny model of each type."""
BIG = ROOT / "benchmarks/models"


def planned(config: EngineConfig, checkpoint: Checkpoint, gpu_bytes: int | None = None) -> list[RankPlan]:
    size = config.parallel.tensor_parallel_size
    (layout,) = plan(PlanLaunch(config, checkpoint, [size], gpu_bytes)).layouts
    assert layout.tensor_parallel_size == size and layout.problem == ""
    return layout.ranks


def loaded(config: EngineConfig, checkpoint: Checkpoint, rank: int) -> Loaded:
    group = Communicator(rank, config.parallel.tensor_parallel_size)
    mesh = Mesh(torch.device("cpu"), tp=group, ep=group)
    return Worker(config, checkpoint, mesh, lambda *progress: None).load()


def assert_agrees(config: EngineConfig, checkpoint: Checkpoint) -> list[RankPlan]:
    ranks = planned(config, checkpoint)
    assert len(ranks) == config.parallel.tensor_parallel_size
    for rank in ranks:
        real = loaded(config, checkpoint, rank.rank)
        assert (rank.weight_bytes, rank.kv_specs, rank.kv_bytes) == (
            real.weight_bytes,
            real.kv_specs,
            real.kv_bytes,
        )
        assert sum(rank.weights.values()) == rank.weight_bytes
    return ranks


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_is_what_a_worker_reports(name: str, size: int, tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny(name), tmp_path)[1]
    assert_agrees(engine_config(size), checkpoint)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", FP8_MODELS, ids=lambda model: model.name)
def test_fp8_in_blocks(model: object, size: int, tmp_path: Path) -> None:
    save_fp8(model, tmp_path)  # type: ignore[arg-type]
    ranks = assert_agrees(engine_config(size), checkpoint_of(tmp_path))
    assert all(rank.weights["BlockFP8"] for rank in ranks)


@pytest.mark.parametrize("size", [1, 2])
def test_mxfp4_experts(size: int, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    ranks = assert_agrees(engine_config(size), checkpoint_of(tmp_path))
    assert all(rank.weights["MXFP4"] for rank in ranks)


def test_dtypes_expert_parallel_and_speculation(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny("qwen3-moe"), tmp_path)[1]
    config = engine_config(2, kv_cache_dtype="fp8", dtype="bfloat16")
    config = replace(
        config,
        parallel=replace(config.parallel, enable_expert_parallel=True),
        speculative=SpeculativeConfig(
            method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2
        ),
    )
    assert_agrees(config, checkpoint)


def big(name: str, tmp_path: Path, **changes: object) -> Checkpoint:
    config = json.loads((BIG / name / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_directory(tmp_path, tmp_path, {})


def gpu_config(size: int = 1) -> EngineConfig:
    config = engine_config(size, block_size=16, dtype="bfloat16")
    cache = replace(config.cache, kv_cache_memory_bytes=None)
    model, device = replace(config.model, max_model_len=None), replace(config.device, device="cuda")
    return replace(config, cache=cache, model=model, device=device)


# Parameters as published, in 1e9, and bytes of KV for a token: 2 x layers x KV heads x head size x 2.
PUBLISHED = {
    "Qwen3-0.6B": (0.596, 2 * 28 * 8 * 128 * 2),
    "Qwen3-8B": (8.19, 2 * 36 * 8 * 128 * 2),
    "Llama-3.1-8B": (8.03, 2 * 32 * 8 * 128 * 2),
    "DeepSeek-V3": (671.0, 61 * (512 + 64) * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_on_an_assumed_gpu(name: str, tmp_path: Path) -> None:
    parameters, kv_bytes = PUBLISHED[name]
    (rank,) = planned(gpu_config(), big(name, tmp_path), 140 << 30)
    assert rank.weight_bytes == pytest.approx(parameters * 2e9, rel=2e-3)
    assert list(rank.weights) == ["plain"]
    assert rank.kv_specs == [FullAttentionSpec(16, 16 * kv_bytes)]
    assert rank.left_bytes == int(0.9 * (140 << 30)) - rank.weight_bytes
    logits = 64 * big(name, tmp_path).vocab_size * 4
    assert rank.kv_bytes == max(rank.left_bytes - logits, 0)


def test_deepseek_v3_in_fp8_on_eight_assumed_gpus(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    checkpoint = big("DeepSeek-V3", tmp_path, quantization_config=quantization)
    whole, split = plan(PlanLaunch(gpu_config(), checkpoint, [1, 8], 140 << 30)).layouts
    # A byte for each weight, and what stays in 16 bits: embedding, LM head, router, kv_b_proj.
    assert 671e9 < whole.ranks[0].weight_bytes < 700e9 and whole.ranks[0].kv_bytes == 0
    (rank,) = split.ranks
    assert whole.ranks[0].weight_bytes / 8 < rank.weight_bytes < 1.02 * whole.ranks[0].weight_bytes / 8
    assert rank.weights["BlockFP8"] > 0.9 * rank.weight_bytes and rank.kv_bytes > 0


def test_context_ranks_have_a_share_of_the_kv_cache(tmp_path: Path) -> None:
    """DeepSeek-V3 on eight ranks: the same bytes of a rank hold eight times the tokens."""
    checkpoint, config = big("DeepSeek-V3", tmp_path), gpu_config()
    parallel = replace(config.parallel, tensor_parallel_size=16, decode_context_parallel_size=8)
    shared = replace(config, parallel=parallel)
    (whole,) = plan(PlanLaunch(config, checkpoint, [8], 180 << 30)).layouts[0].ranks
    four, eight = plan(PlanLaunch(shared, checkpoint, [4, 8], 180 << 30)).layouts
    assert four.ranks == [] and "ranks must divide tp 4: dcp 8" in four.problem
    (part,) = eight.ranks
    assert part.kv_specs == [FullAttentionSpec(8 * 16, 61 * 16 * 576 * 2)]
    assert msgspec.structs.replace(part, kv_specs=whole.kv_specs) == whole
    whole_tokens, part_tokens = (
        plan_cache(config, 1 << 17, [Loaded(0, rank.kv_specs, rank.kv_bytes, rank.weight_bytes)]).kv_tokens
        for rank in (whole, part)
    )
    assert part_tokens == 8 * whole_tokens > 0


def test_symmetric_memory_of_mori_is_taken_from_the_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For assumed GPUs; and a heap that is set and too small ends the plan, as it would a start."""
    _, checkpoint = save_tiny(tiny("qwen3-moe"), tmp_path)
    base = engine_config()
    spread = replace(base.parallel, data_parallel_size=2, enable_expert_parallel=True)
    cache = replace(base.cache, kv_cache_memory_bytes=None)
    config = replace(base, parallel=spread, cache=cache, device=replace(base.device, device="cuda"))
    with_mori = replace(config, parallel=replace(spread, all2all_backend="mori"))
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "")
    (without,), (rank,) = planned(config, checkpoint, 80 << 30), planned(with_mori, checkpoint, 80 << 30)
    assert without.dispatch_bytes == 0 < rank.dispatch_bytes < 1 << 30
    assert rank.kv_bytes == without.kv_bytes - rank.dispatch_bytes
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "1M")
    with pytest.raises(ValueError, match="MORI_SHMEM_HEAP_SIZE=1M is too small"):
        planned(with_mori, checkpoint, 80 << 30)


def test_buffers_of_the_expert_balancer_are_taken_from_the_kv_cache(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: an expert is 3 x 2048 x 768 weights in bfloat16, of which 64 MiB are sent in a step."""
    checkpoint, config = big("Qwen3-30B-A3B", tmp_path), gpu_config(4)
    fixed = replace(config.parallel, enable_expert_parallel=True)
    moving = replace(fixed, enable_eplb=True)
    ((without, *_), (rank, *_)) = (
        planned(replace(config, parallel=parallel), checkpoint, 80 << 30) for parallel in (fixed, moving)
    )
    expert = 3 * 2048 * 768 * 2
    assert (without.buffer_bytes, rank.buffer_bytes) == (0, 2 * ((64 << 20) // expert) * expert)
    assert rank.weight_bytes == without.weight_bytes and rank.left_bytes == without.left_bytes
    assert rank.kv_bytes == without.kv_bytes - rank.buffer_bytes


def test_no_memory_is_allocated_for_the_weights(tmp_path: Path) -> None:
    before = peak_bytes()
    planned(gpu_config(), big("Llama-3.1-8B", tmp_path), 1 << 30)
    assert peak_bytes() - before < 1 << 28


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_windows_and_states_are_planned_apart(tmp_path: Path) -> None:
    (window,) = planned(engine_config(), save_tiny(tiny("mistral-window"), tmp_path / "a")[1])
    (states,) = planned(engine_config(), save_tiny(tiny("qwen3-next"), tmp_path / "b")[1])
    assert [type(spec) for spec in window.kv_specs] == [SlidingWindowSpec]
    assert {type(spec) for spec in states.kv_specs} == {FullAttentionSpec, RecurrentStateSpec}


def test_a_layout_that_cannot_be_split_has_a_problem(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny("llama-gqa"), tmp_path)[1]
    one, three = plan(PlanLaunch(engine_config(), checkpoint, [1, 3])).layouts
    assert one.ranks and not one.problem
    assert not three.ranks and "--tensor-parallel-size 3 does not fit" in three.problem
    with pytest.raises(ValueError, match="--tensor-parallel-size 3 does not fit"):
        plan(PlanLaunch(engine_config(3), checkpoint, [1, 3]))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny("llama-gqa"), tmp_path)[1]
    less = {key: value for key, value in checkpoint.hf_config.items() if key != "intermediate_size"}
    with pytest.raises(ValueError, match="lacks 'intermediate_size'"):
        plan(PlanLaunch(engine_config(), replace(checkpoint, hf_config=less), [1]))
