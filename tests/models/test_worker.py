"""Logprobs at every position and greedy ids of every family in one worker, compared with transformers."""

from itertools import pairwise

import pytest
import torch

from tests.helpers.checkpoints.reference import NEW_TOKENS, TOLERANCE, Reference, ReferenceOf
from tests.helpers.checkpoints.rows import ON_TWO_RANKS, model_rows
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits, step_logits


@pytest.mark.proves("logits")
@pytest.mark.parametrize("name", model_rows())
def test_every_position_in_chunks_and_together(name: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    tiny = TinyWorker(reference.directory)
    for chunk in (64, 16, 7, 1):
        check_chunks(tiny, reference, chunk)
    check_together(tiny, reference)


@pytest.mark.proves("mixed")
@pytest.mark.parametrize("name", model_rows([ON_TWO_RANKS]))
@pytest.mark.parametrize(("chunk", "stagger"), [(16, 3), (7, 5)], ids=str)
def test_prefill_and_decode_in_one_batch(
    name: str, chunk: int, stagger: int, reference_of: ReferenceOf
) -> None:
    reference = reference_of(name)
    tiny = TinyWorker(reference.directory)
    found = generate(tiny.core(), tiny.execute, reference.prompts, NEW_TOKENS, chunk, stagger)
    assert found == reference.ids


def check_chunks(tiny: TinyWorker, reference: Reference, chunk: int) -> None:
    """The longest text in steps of `chunk` tokens."""
    longest = reference.continuations[-1]
    bounds = [*range(0, len(longest.text), chunk), len(longest.text)]
    core = tiny.core()
    core.add(0, longest.text)
    found_TV = forced_logits(tiny.worker, core, 0, [end - start for start, end in pairwise(bounds)])
    assert_close(found_TV, longest.logprobs_TV)


def check_together(tiny: TinyWorker, reference: Reference) -> None:
    """All texts in one step."""
    core = tiny.core()
    for row, continuation in enumerate(reference.continuations):
        core.add(row, continuation.text)
    lengths = {row: len(continuation.text) for row, continuation in enumerate(reference.continuations)}
    found_TV = step_logits(tiny.worker, core.plan(lengths))
    assert_close(found_TV, torch.cat([continuation.logprobs_TV for continuation in reference.continuations]))


def assert_close(found_TV: torch.Tensor, logprobs_TV: torch.Tensor) -> None:
    # The rounding of the largest logits, which some families scale, is not that of the smallest.
    torch.testing.assert_close(found_TV.log_softmax(-1), logprobs_TV, atol=TOLERANCE, rtol=1e-5)
