"""A real model through the real processes: every way of running gives transformers' tokens."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from atom.shared.outputs import RequestOutput
from tests.helpers.checkpoints.smollm2 import (
    NEW_TOKENS,
    NUM_LONG,
    PROMPTS,
    Reference,
    computed,
    gguf_path,
    references,
    scores,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=200, seed=1234, max_tokens=NEW_TOKENS, ignore_eos=True
)

# `make test` compares SmolLM2's replies over HTTP in test_server.py.
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@contextlib.contextmanager
def engine(max_model_len: int = 2048, **options: Any) -> Iterator[LLMEngine]:
    model = gguf_path()
    with LLMEngine(model=model, dtype="float32", max_model_len=max_model_len, **options) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    rows = references()
    assert min(row.min_gap for row in rows) > 2e-4, "a prompt is too close to a tie to compare"
    return rows


@pytest.fixture(scope="module")
def sampled_alone() -> list[int]:
    """The seeded request, alone in an engine that has seen nothing else."""
    with engine() as made:
        return made.generate([PROMPTS[1]], SAMPLED)[0]["token_ids"]


def greedy_ids(made: LLMEngine, expected: list[Reference]) -> list[list[int]]:
    outputs = made.generate([row.prompt_ids for row in expected], GREEDY)
    return [output["token_ids"] for output in outputs]


def test_what_is_recorded_is_what_transformers_computes(expected: list[Reference]) -> None:
    continuations, scored = computed()
    for found, wanted in zip(continuations, expected, strict=True):
        assert (found.prompt_ids, found.greedy_ids) == (wanted.prompt_ids, wanted.greedy_ids)
        assert found.min_gap == pytest.approx(wanted.min_gap, abs=1e-4)
    for score, before in zip(scored, scores(), strict=True):
        assert (score.ids, score.context_length) == (before.ids, before.context_length)
        assert score.is_best == before.is_best
        assert score.log_probabilities == pytest.approx(before.log_probabilities, abs=1e-4)


def test_one_worker_cold_and_warm(expected: list[Reference], sampled_alone: list[int]) -> None:
    wanted = [row.greedy_ids for row in expected]
    with engine() as made:
        assert greedy_ids(made, expected) == wanted
        cold = made.stats()
        assert greedy_ids(made, expected) == wanted
        warm = made.stats()
        assert warm.prefix_hits - cold.prefix_hits >= 1600
        assert warm.overlapped_steps > 0
        crowd = made.generate([PROMPTS[i % 5] for i in range(31)] + [PROMPTS[1]], [GREEDY] * 31 + [SAMPLED])
        assert [out["token_ids"] for out in crowd[:31]] == [wanted[i % 5] for i in range(31)]
        assert crowd[31]["token_ids"] == sampled_alone


def test_two_workers(expected: list[Reference], sampled_alone: list[int]) -> None:
    some = expected[::2]
    with engine(tensor_parallel_size=2) as made:
        assert greedy_ids(made, some) == [row.greedy_ids for row in some]
        assert made.generate([PROMPTS[1]], SAMPLED)[0]["token_ids"] == sampled_alone
        one, two = made.weight_bytes
        assert 0.45 < one / (one + two) < 0.55
        assert made.stats().overlapped_steps > 0


def test_tiny_steps_without_prefix_cache(expected: list[Reference]) -> None:
    with engine(max_num_batched_tokens=32, enable_prefix_caching=False) as made:
        assert greedy_ids(made, expected) == [row.greedy_ids for row in expected]
        stats = made.stats()
        assert stats.chunked_prefills >= 1600 // 32
        assert stats.prefix_hits == 0


def test_preemption(expected: list[Reference], sampled_alone: list[int]) -> None:
    """A cache that holds the longest request and little more."""
    blocks = 112
    with engine(1728, num_kv_blocks=blocks, max_num_batched_tokens=128) as made:
        # The long prompt is admitted with six short ones, and their growth pushes it out again.
        rows = [*expected[:6], expected[-1], *expected[6:12]]
        assert greedy_ids(made, rows) == [row.greedy_ids for row in rows]
        greedy = made.stats()
        assert greedy.kv_blocks_total == blocks
        assert greedy.prefill_preemptions > 0
        assert greedy.preemptions > greedy.prefill_preemptions
        # Four blocks each at the end: not all of these can stay.
        crowd = made.generate([PROMPTS[1]] * 32, SAMPLED)
        assert made.stats().preemptions > greedy.preemptions
        assert [out["token_ids"] for out in crowd] == [sampled_alone] * 32


def test_twins_share_blocks_that_are_still_being_computed(expected: list[Reference]) -> None:
    story = expected[-NUM_LONG]
    with engine() as made:
        outputs = made.generate([story.prompt_ids] * 8, GREEDY)
        assert [out["token_ids"] for out in outputs] == [story.greedy_ids] * 8
        assert made.stats().prefix_hits == 7 * (len(story.prompt_ids) // 16 * 16)


def test_fp8_cache_is_close(expected: list[Reference]) -> None:
    """fp8 keeps the first tokens of most prompts, and the text sensible."""
    some = expected[::2]
    with engine(kv_cache_dtype="fp8") as made:
        ids = greedy_ids(made, some)
    same = sum(got[:8] == row.greedy_ids[:8] for got, row in zip(ids, some, strict=True))
    assert same >= len(some) * 2 // 3
    assert ids != [row.greedy_ids for row in some], "nothing was rounded: is the cache fp8?"


def test_library_streams_and_stops(expected: list[Reference]) -> None:
    with engine() as made:
        pieces: list[RequestOutput] = []
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_strings=[" Paris"], ignore_eos=True)
        made.add_request(["The capital of France is"], params, stream_callback=pieces.append)
        while not made.is_finished():
            ended = made.step()
        assert ended[0].text == "".join(piece.text for piece in pieces)
        assert " Paris" not in ended[0].text
        assert ended[0].finish_reason == "stop_sequence"
        assert pieces[-1].finished
        (earlier,) = made.add_request(["Hello"], SamplingParams(max_tokens=2, ignore_eos=True))
        made.generate(["Good morning"], SamplingParams(max_tokens=16, ignore_eos=True))
        assert not made.is_finished()
        assert [sequence.request_id for sequence in made.step()] == [earlier]
        assert made.is_finished()
        with pytest.raises(ValueError, match="--scheduling-policy priority"):
            made.generate(["Hello"], SamplingParams(priority=3))
        two = made.generate(["Hello"], SamplingParams(n=2, seed=7, max_tokens=8, ignore_eos=True))
        assert two[0]["token_ids"] != two[1]["token_ids"]
        with pytest.raises(ValueError, match="2048"):
            made.generate([[1] * 2040], SamplingParams(max_tokens=64))
        with pytest.raises(ValueError, match="vocabulary|token"):
            made.generate([[10**6]], GREEDY)
