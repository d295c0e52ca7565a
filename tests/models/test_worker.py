"""Every family in one worker, beside transformers: every log probability at every position; greedy ids."""

from itertools import pairwise

import pytest
import torch

from tests.helpers.core_side import generate
from tests.helpers.reference import NEW_TOKENS, TOLERANCE, Reference, ReferenceOf
from tests.helpers.rows import ON_TWO_RANKS, model_rows
from tests.helpers.teacher_forcing import TinyWorker, forced_logits, step_logits


@pytest.mark.proves("logits")
@pytest.mark.parametrize("name", model_rows())
def test_every_position_in_chunks_and_together(name: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    tiny = TinyWorker(reference.directory)
    for piece in (64, 16, 7, 1):
        check_pieces(tiny, reference, piece)
    check_together(tiny, reference)


@pytest.mark.proves("mixed")
@pytest.mark.parametrize("name", model_rows([ON_TWO_RANKS]))
@pytest.mark.parametrize(("piece", "stagger"), [(16, 3), (7, 5)], ids=str)
def test_prompts_join_decodes(name: str, piece: int, stagger: int, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    tiny = TinyWorker(reference.directory)
    found = generate(tiny.core(), tiny.execute, reference.prompts, NEW_TOKENS, piece, stagger)
    assert found == reference.ids


def check_pieces(tiny: TinyWorker, reference: Reference, piece: int) -> None:
    """The longest text, so many tokens a step."""
    longest = reference.answers[-1]
    places = [*range(0, len(longest.text), piece), len(longest.text)]
    core = tiny.core()
    core.add(0, longest.text)
    found_TV = forced_logits(tiny.worker, core, 0, [end - start for start, end in pairwise(places)])
    assert_close(found_TV, longest.logprobs_TV)


def check_together(tiny: TinyWorker, reference: Reference) -> None:
    """All texts, whole, in one step."""
    core = tiny.core()
    for row, answer in enumerate(reference.answers):
        core.add(row, answer.text)
    lengths = {row: len(answer.text) for row, answer in enumerate(reference.answers)}
    found_TV = step_logits(tiny.worker, core.plan(lengths))
    assert_close(found_TV, torch.cat([answer.logprobs_TV for answer in reference.answers]))


def assert_close(found_TV: torch.Tensor, logprobs_TV: torch.Tensor) -> None:
    torch.testing.assert_close(found_TV.log_softmax(-1), logprobs_TV, atol=TOLERANCE, rtol=0)
