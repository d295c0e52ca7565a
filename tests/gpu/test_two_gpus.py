"""Layouts over two GPUs in bfloat16: the distributions of every prompt position are those of one GPU."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atom import LLMEngine, SamplingParams

VOCABULARY, LENGTH, PROMPTS, TOP = 4096, 160, 5, 20
MOST_NATS = 1e-3
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 2048, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 4, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 16, **EXPERTS},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        **EXPERTS,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "tp-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp-ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
ROWS = [(model, layout) for model in MODELS for layout in LAYOUTS if layout == "tp" or model != "qwen3"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.timeout(120),
]
Distributions = list[dict[int, float]]
"""For each position the most likely ids, with their log probabilities."""


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Distributions]]:
    """For a model's name its checkpoint, and what one GPU computes."""

    @cache
    def made(name: str) -> tuple[Path, Distributions]:
        directory = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        config = AutoConfig.for_model(name, **COMMON, **MODELS[name])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.lm_head.weight.mul_(6)  # else all tokens are about as likely
        model.save_pretrained(directory)
        return directory, distributions(directory, {})

    return made


def distributions(model: Path, layout: dict[str, Any]) -> Distributions:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=generator).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=TOP)
    with LLMEngine(
        model=str(model), device="cuda", max_num_seqs=4, max_num_batched_tokens=512, max_model_len=256,
        cudagraph_capture_sizes="[1, 4]", gpu_memory_utilization=0.3, **layout,
    ) as engine:  # fmt: skip
        outputs = engine.generate(ids, sampling)
    return [position for output in outputs for position in output["prompt_logprobs"][1:]]


def divergence(expected: dict[int, float], found: dict[int, float]) -> float:
    """Divergence of the ids in both, and of all others as one."""
    both = sorted(expected.keys() & found.keys())
    pairs = [(math.exp(expected[token]), math.exp(found[token])) for token in both]
    rest = [max(1 - sum(each), 1e-9) for each in zip(*pairs, strict=True)]
    return sum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])])


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=["-".join(row) for row in ROWS])
def test_distributions(
    model: str, layout: str, on_one_gpu: Callable[[str], tuple[Path, Distributions]]
) -> None:
    directory, expected = on_one_gpu(model)
    found = distributions(directory, LAYOUTS[layout])
    nats = sorted(map(divergence, expected, found))
    middle, mean = nats[len(nats) // 2], sum(nats) / len(nats)
    print(f"{model} {layout}: median {middle:.2e}, mean {mean:.2e} nats")
    # Rounding selects other experts for a few tokens, on one GPU too.
    assert middle < MOST_NATS and mean < 30 * MOST_NATS


def test_all_reduces_during_gemms(
    on_one_gpu: Callable[[str], tuple[Path, Distributions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of several tokens in parts, within graphs and without."""
    monkeypatch.setenv("ATOM_OVERLAP_ALLREDUCE_TOKENS", "2")
    directory, expected = on_one_gpu("qwen3")
    found = distributions(directory, LAYOUTS["tp"])
    nats = sorted(map(divergence, expected, found))
    assert nats[len(nats) // 2] < MOST_NATS
