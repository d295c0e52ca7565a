"""Greedy ids and log probabilities of every family in the real engine, compared with transformers.

Tests that differ only in their requests share one engine. A tight engine prefills in chunks of 16 and
has only the KV blocks that its longest request needs; a roomy one prefills whole prompts. Families
with recurrent states must have no prefix cache hits and the same outputs.
"""

import pytest

from atom.shared.sampling_params import MAX_LOGPROBS
from tests.helpers.checkpoints.reference import TOLERANCE
from tests.helpers.checkpoints.rows import roomy_rows, tight_rows
from tests.helpers.engine.served import CHUNK, Counted, Served, ids_of, worst_difference

each_roomy = pytest.mark.parametrize("roomy", roomy_rows(), indirect=True)
each_tight = pytest.mark.parametrize("tight", tight_rows(), indirect=True)


@each_tight
@pytest.mark.proves("chunked", "prefix")
def test_chunked_prefill_and_prefix_cache_hit(tight: Served) -> None:
    longest = tight.reference.continuations[-1]
    cold, counted = tight.generate([longest.prompt])
    assert counted.chunked_prefills >= len(longest.prompt) // CHUNK - 1 and counted.prefix_hits == 0
    assert ids_of(cold) == [longest.greedy.ids]
    # With sliding windows in every layer the cache is small: the sampled tokens evicted the prompt.
    tight.generate([longest.prompt], max_tokens=1)
    warm, counted = tight.generate([longest.prompt])
    assert_prefix_hits(tight, counted, more_than=len(longest.prompt) // 2)
    assert ids_of(warm) == [longest.greedy.ids]


@each_tight
@pytest.mark.proves("mixed", "preempted")
def test_preempted_and_resumed(tight: Served) -> None:
    """Short prompts are admitted together and outgrow the KV cache, whatever the window."""
    shortest, *others = tight.reference.continuations
    continuations = [shortest] * 3 + others
    outputs, counted = tight.generate([continuation.prompt for continuation in continuations])
    assert counted.preempted_decodes > 0
    assert ids_of(outputs) == [continuation.greedy.ids for continuation in continuations]


@each_tight
@pytest.mark.proves("logits")
def test_log_probabilities_of_chunks(tight: Served) -> None:
    check_prompt_logprobs(tight)
    check_sampled_logprobs(tight)


@each_roomy
@pytest.mark.proves("mixed", "prefix")
def test_batched_prompts_and_prefix_cache_hits(roomy: Served) -> None:
    prompts, expected = roomy.reference.prompts, roomy.reference.ids
    cold, counted = roomy.generate(prompts)
    assert counted.prefix_hits == 0 and counted.chunked_prefills == 0
    assert ids_of(cold) == expected
    warm, counted = roomy.generate(prompts)
    if not roomy.reference.keeps_states:  # whose prompts are too short here to save a state
        assert_prefix_hits(roomy, counted)
    assert ids_of(warm) == expected


@each_roomy
@pytest.mark.proves("prefix")
def test_prompts_that_continue_cached_outputs(roomy: Served) -> None:
    """Blocks filled by decode steps are found in the prefix cache."""
    expected = roomy.reference.ids
    roomy.generate(roomy.reference.prompts)
    longer = [continuation.text[:-8] for continuation in roomy.reference.continuations]
    outputs, counted = roomy.generate(longer, max_tokens=8)
    assert_prefix_hits(roomy, counted, more_than=sum(map(len, roomy.reference.prompts)) // 2)
    assert ids_of(outputs) == [ids[-8:] for ids in expected]


@each_roomy
@pytest.mark.proves("logits")
def test_log_probabilities_of_whole_prompts(roomy: Served) -> None:
    check_prompt_logprobs(roomy)
    check_sampled_logprobs(roomy)


def assert_prefix_hits(model: Served, counted: Counted, more_than: int = 0) -> None:
    """More than so many prefix cache hits; families with recurrent states have them at fewer positions."""
    assert counted.prefix_hits > (0 if model.reference.keeps_states else more_than)


def check_prompt_logprobs(model: Served) -> None:
    """Prompt logprobs of every token."""
    texts = [continuation.text[:-1] for continuation in model.reference.continuations]
    outputs, _ = model.generate(texts, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    for output, continuation in zip(outputs, model.reference.continuations, strict=True):
        first, *others = output["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry)) for entry in others] == continuation.text[1:-1]
        assert worst_difference(others, continuation.logprobs_TV[:-2]) <= TOLERANCE


def check_sampled_logprobs(model: Served) -> None:
    """Logprobs of every sampled token."""
    outputs, _ = model.generate(model.reference.prompts, logprobs=MAX_LOGPROBS)
    for output, continuation in zip(outputs, model.reference.continuations, strict=True):
        expected_TV = continuation.logprobs_TV[len(continuation.prompt) - 1 : -1]
        assert worst_difference(output["logprobs"], expected_TV) <= TOLERANCE
