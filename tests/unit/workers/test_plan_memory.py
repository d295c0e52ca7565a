"""A plan on the meta device agrees with what a worker reports once its weights are loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.config.speculative import SpeculativeConfig
from atom.messages.plan import PlanLaunch, RankPlan
from atom.messages.worker import Loaded, RecurrentStateSpec, SlidingWindowSpec
from tests.helpers.fp8 import FP8_MODELS, save_fp8
from tests.helpers.mxfp4 import save_mxfp4
from tests.helpers.tiny_models import checkpoint_of, engine_config, save_tiny, tiny
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from workers.hf_directory import read_directory
from workers.plan_memory import plan
from workers.worker import Worker

FAMILIES = [
    "llama-gqa",
    "llama-mha-tied",
    "mistral-window",
    "qwen2",
    "qwen3-odd-gqa-biases-windows",
    "qwen3-moe",
    "mixtral",
    "glm4-moe",
    "deepseek-v2-lite",
    "deepseek-v3-biases-halves-tied",
    "deepseek-v3.2",
    "glm-5",
    "gpt-oss",
    "qwen3-next",
]
BIG = Path(__file__).resolve().parents[3] / "atom/benchmarks/models"


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
