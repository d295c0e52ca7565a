"""MLA engines whose ranks split the latent cache by tokens: ids and log probabilities of transformers."""

from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from atom.shared.sampling_params import MAX_LOGPROBS
from tests.helpers.checkpoints.reference import MAX_TOKENS, NEW_TOKENS, TOLERANCE, Reference, make_reference
from tests.helpers.checkpoints.tiny_models import tiny
from tests.helpers.engine.served import ids_of, worst_difference

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
BLOCK = 4


def engine(reference: Reference, tp: int, dcp: int, **options: Any) -> LLMEngine:
    """Steps of 24 tokens, and KV blocks for little more than the longest request."""
    return LLMEngine(
        str(reference.directory),
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        block_size=BLOCK,
        num_kv_blocks=-(-MAX_TOKENS // (BLOCK * dcp)) + 2,
        **options,
    )


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": NEW_TOKENS} | params)


@pytest.mark.parametrize(
    ("name", "tp", "options"),
    [("deepseek-v3", 2, NGRAM), pytest.param("deepseek-v2-lite", 4, {}, marks=pytest.mark.slow)],
    ids=["one-group-drafts", "two-groups"],
)
def test_ids_under_mixed_load(tmp_path: Path, name: str, tp: int, options: dict[str, Any]) -> None:
    """Chunks, decodes and preemptions together; then prefix cache hits and prompt log probabilities."""
    reference = make_reference(tiny(name), tmp_path)
    continuations = [reference.continuations[0]] * 2 + reference.continuations
    with engine(reference, tp, 2, **options) as running:
        outputs = running.generate([each.prompt for each in continuations], greedy())
        assert ids_of(outputs) == [each.greedy.ids for each in continuations]
        stats = running.stats()
        assert stats.preemptions > 0 and stats.chunked_prefills > 0 and stats.overlapped_steps > 0
        assert (sum(stats.num_accepted_tokens_per_pos) > 0) == bool(options)
        longest = reference.continuations[-1]
        for _ in range(2):
            (again,) = running.generate([longest.text[:-8]], greedy(max_tokens=8))
            assert again["token_ids"] == longest.greedy.ids[-8:]
        assert running.stats().prefix_hits - stats.prefix_hits >= len(longest.prompt)
        (scored,) = running.generate([longest.text[:-1]], greedy(max_tokens=1, prompt_logprobs=MAX_LOGPROBS))
        assert worst_difference(scored["prompt_logprobs"][1:], longest.logprobs_TV[:-2]) <= TOLERANCE
