"""Speculation in the real engine, on one rank and on several: the tokens of the plain run."""

from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from tests.helpers.checkpoints.mtp_models import save_mtp_model
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 160,
    "cpu_threads": 1,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "num_kv_blocks": 100,
}
pytestmark = pytest.mark.timeout(400)
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
    "spec_decode_adaptive": False,
}
PROMPTS = [prompt_of(4, seed) * 4 for seed in range(10)]


def params() -> list[SamplingParams]:
    """Greedy and sampled, with penalties, log probabilities and several sequences."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 2},
        {"temperature": 0.4, "n": 2, "min_tokens": 5},
    ]
    return [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=number, **kinds[number % len(kinds)])
        for number in range(len(PROMPTS))
    ]


def run(directory: Path, rounds: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """What is generated in the last of so many equal rounds."""
    with LLMEngine(str(directory), **OPTIONS | options) as engine:
        aborted = engine.add_request(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        engine.abort(aborted)
        for _ in range(rounds):
            outputs = engine.generate(PROMPTS, params())
        return [output["token_ids"] for output in outputs], engine.stats()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(tiny("qwen3-moe"), directory)
    return directory


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Any]:
    return run(model)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_parallel_size": 2},
        # Engines in lockstep, whose requests are preempted and resumed.
        {"tensor_parallel_size": 2, "enable_dp_attention": True, "num_kv_blocks": 10},
    ],
    ids=["one-rank", "tp-2", "dp-attention-2"],
)
def test_drafts_change_no_token(model: Path, wanted: list[Any], layout: dict[str, Any]) -> None:
    found, stats = run(model, **NGRAM, **layout)
    assert found == wanted
    assert sum(stats.num_accepted_tokens_per_pos) > 5
    assert stats.preemptions > 0 or "num_kv_blocks" not in layout


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafter")
    save_tiny(tiny("llama-gqa"), directory)
    return directory


def test_engines_in_lockstep_draft_with_a_model(model: Path, drafter: Path, wanted: list[Any]) -> None:
    """Each engine drafts for its own requests: a model without experts waits for no other engine."""
    layout = {"tensor_parallel_size": 2, "enable_dp_attention": True, "num_kv_blocks": 24}
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "draft_model": str(drafter)}
    found, stats = run(model, **drafts, **layout, spec_decode_adaptive=False)
    assert found == wanted
    assert stats.num_draft_tokens > 50


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer for multi-token prediction, which has experts as the others have."""
    directory = tmp_path_factory.mktemp("predicting")
    save_mtp_model(tiny("glm4-moe"), directory)
    return directory


@pytest.mark.parametrize(
    "adaptive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["always", "adaptive"]
)
def test_engines_in_lockstep_draft_with_a_layer_of_experts(predicting: Path, adaptive: bool) -> None:
    """Each pass of the layer has the collectives of all engines, those without a step included."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "spec_decode_adaptive": adaptive}
    layout = {"data_parallel_size": 2, "enable_expert_parallel": True, "num_kv_blocks": 24}
    found, stats = run(predicting, **drafts, **layout)
    assert found == run(predicting)[0]
    assert stats.num_draft_tokens > 50 or adaptive
    assert sum(stats.num_accepted_tokens_per_pos) > 3


@pytest.mark.slow
def test_experts_move_while_a_layer_of_experts_drafts(predicting: Path) -> None:
    """Those of the layer, too; replicas included."""
    often = '{"window_size": 3, "step_interval": 17, "num_redundant_experts": 2}'
    layout = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": often,
    }
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "spec_decode_adaptive": False}
    found, stats = run(predicting, 4, **drafts, **layout)
    assert found == run(predicting)[0]
    assert sum(stats.num_accepted_tokens_per_pos) > 3
    assert stats.experts_moved > 0


@pytest.mark.parametrize("method", ["mtp", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_ranks_that_split_the_cache_by_tokens_draft(method: str, tmp_path: Path) -> None:
    """The cache of what drafts is split as the model's is."""
    save_mtp_model(tiny("deepseek-v3"), tmp_path)
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "spec_decode_adaptive": False}
    drafts |= {"draft_model": str(tmp_path)} if method == "draft_model" else {}
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    found, stats = run(tmp_path, **drafts, **layout)
    assert found == run(tmp_path)[0]
    assert sum(stats.num_accepted_tokens_per_pos) > 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_in_lockstep_draft_with_a_model_of_experts(
    model: Path, wanted: list[Any], ranks: int
) -> None:
    layout = {"data_parallel_size": 2, "tensor_parallel_size": ranks, "enable_expert_parallel": True}
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "draft_model": str(model)}
    found, stats = run(model, **drafts, **layout, spec_decode_adaptive=False)
    assert found == wanted
    assert sum(stats.num_accepted_tokens_per_pos) > 50
