"""Every family through the real engine, beside transformers: greedy ids and log probabilities.

Cases that differ only per request share one engine. A tight one computes prompts in chunks of 16,
with no more KV blocks than its longest request needs; a roomy one computes them whole. Families that
keep states are shown to find nothing in the prefix cache, and to give the same answers.
"""

import pytest

from atom.sampling_params import MAX_LOGPROBS
from tests.helpers.reference import TOLERANCE
from tests.helpers.rows import roomy_rows, tight_rows
from tests.helpers.served import CHUNK, Counted, Served, ids_of, worst_difference

each_roomy = pytest.mark.parametrize("roomy", roomy_rows(), indirect=True)
each_tight = pytest.mark.parametrize("tight", tight_rows(), indirect=True)


@each_tight
@pytest.mark.proves("chunked", "prefix")
def test_alone_in_chunks_and_out_of_the_prefix_cache(tight: Served) -> None:
    longest = tight.reference.answers[-1]
    cold, counted = tight.generate([longest.prompt])
    assert counted.chunked_prefills >= len(longest.prompt) // CHUNK - 1 and counted.prefix_hits == 0
    assert ids_of(cold) == [longest.greedy.ids]
    # Of windows alone the cache holds little: so many drawn tokens replaced the prompt in it.
    tight.generate([longest.prompt], max_tokens=1)
    warm, counted = tight.generate([longest.prompt])
    assert_found(tight, counted, more_than=len(longest.prompt) // 2)
    assert ids_of(warm) == [longest.greedy.ids]


@each_tight
@pytest.mark.proves("mixed", "preempted")
def test_preempted_and_resumed(tight: Served) -> None:
    """Short prompts are let in together, and outgrow the cache whatever the window."""
    shortest, *others = tight.reference.answers
    answers = [shortest] * 3 + others
    outputs, counted = tight.generate([answer.prompt for answer in answers])
    assert counted.preempted_answers > 0
    assert ids_of(outputs) == [answer.greedy.ids for answer in answers]


@each_tight
@pytest.mark.proves("logits")
def test_log_probabilities_of_chunks(tight: Served) -> None:
    check_prompt_logprobs(tight)
    check_drawn_logprobs(tight)


@each_roomy
@pytest.mark.proves("mixed", "prefix")
def test_together_and_out_of_the_prefix_cache(roomy: Served) -> None:
    prompts, expected = roomy.reference.prompts, roomy.reference.ids
    cold, counted = roomy.generate(prompts)
    assert counted.prefix_hits == 0 and counted.chunked_prefills == 0
    assert ids_of(cold) == expected
    warm, counted = roomy.generate(prompts)
    assert_found(roomy, counted)
    assert ids_of(warm) == expected


@each_roomy
@pytest.mark.proves("prefix")
def test_going_on_from_a_cached_answer(roomy: Served) -> None:
    """Blocks that decode steps filled serve prompts, too."""
    expected = roomy.reference.ids
    roomy.generate(roomy.reference.prompts)
    longer = [answer.text[:-8] for answer in roomy.reference.answers]
    outputs, counted = roomy.generate(longer, max_tokens=8)
    assert_found(roomy, counted, more_than=sum(map(len, roomy.reference.prompts)) // 2)
    assert ids_of(outputs) == [ids[-8:] for ids in expected]


@each_roomy
@pytest.mark.proves("logits")
def test_log_probabilities_of_whole_prompts(roomy: Served) -> None:
    check_prompt_logprobs(roomy)
    check_drawn_logprobs(roomy)


def assert_found(model: Served, counted: Counted, more_than: int = 0) -> None:
    """So many tokens in the prefix cache, where there is one."""
    if model.reference.keeps_states:
        assert counted.prefix_hits == 0
    else:
        assert counted.prefix_hits > more_than


def check_prompt_logprobs(model: Served) -> None:
    """Of every token of texts that are given."""
    texts = [answer.text[:-1] for answer in model.reference.answers]
    outputs, _ = model.generate(texts, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    for output, answer in zip(outputs, model.reference.answers, strict=True):
        first, *others = output["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry)) for entry in others] == answer.text[1:-1]
        assert worst_difference(others, answer.logprobs_TV[:-2]) <= TOLERANCE


def check_drawn_logprobs(model: Served) -> None:
    """Of every token that is drawn, each in a step of its own."""
    outputs, _ = model.generate(model.reference.prompts, logprobs=MAX_LOGPROBS)
    for output, answer in zip(outputs, model.reference.answers, strict=True):
        expected_TV = answer.logprobs_TV[len(answer.prompt) - 1 : -1]
        assert worst_difference(output["logprobs"], expected_TV) <= TOLERANCE
