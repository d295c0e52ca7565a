"""Suffix speculation: the plain run's output, drafts from recent outputs, and a bounded memory."""

import random

import numpy as np
import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.drafting import PLAIN, check_few_blocks, drafting_engine, unchanging
from tests.helpers.engine.varied_requests import check, run
from tests.helpers.engine.whole_engine import WholeEngine
from workers.spec_decode import suffix
from workers.spec_decode.suffix import LONGEST, MOST_PLACES, RecentOutputs, most_common, own_places

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-gqa", "mistral-window", "gpt-oss")
SUFFIX = unchanging(SpeculativeConfig("suffix", 4))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_output_is_the_plain_runs(checkpoints: dict[str, Checkpoint], name: str) -> None:
    plain = drafting_engine(checkpoints[name], PLAIN)
    made = drafting_engine(checkpoints[name], SUFFIX)
    wanted = run(plain, 30)
    check(run(made, 30, wanted), wanted)
    stats = made.core.stats()
    assert sum(stats.num_accepted_tokens_per_pos) > 0.1 * stats.num_draft_tokens > 10
    assert stats.steps < plain.core.stats().steps


def test_preempted_and_cached_requests(checkpoints: dict[str, Checkpoint]) -> None:
    check_few_blocks(checkpoints["llama-gqa"], SUFFIX, blocks=36, requests=40)


def steps_of(made: WholeEngine, number: int, salt: str = "") -> int:
    """Steps of one request, whose text has nothing to look up."""
    before = made.core.stats().steps
    made.add(number, prompt_of(12, seed=4), 24, cache_salt=salt)
    made.run()
    return made.core.stats().steps - before


def test_outputs_of_other_requests_are_drafted(checkpoints: dict[str, Checkpoint]) -> None:
    made = drafting_engine(checkpoints["mistral-window"], SUFFIX)
    first = steps_of(made, 0)
    assert steps_of(made, 1) < 0.7 * first
    assert made.outputs[1].token_ids == made.outputs[0].token_ids


def test_a_request_with_a_salt_shares_no_output(checkpoints: dict[str, Checkpoint]) -> None:
    """Neither do others have drafts of its output, nor has it drafts of theirs."""
    made = drafting_engine(checkpoints["mistral-window"], SUFFIX)
    private = steps_of(made, 0, salt="mine")
    assert steps_of(made, 1) == private
    assert steps_of(made, 2, salt="mine") == private


def places_of(text: list[int], tail: list[int], most: int) -> tuple[int, list[list[int]]]:
    """The longest match by definition, and what follows each of its places."""
    for length in range(min(len(tail), LONGEST), 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == tail[-length:]]
        if ends:
            return length, [text[end : end + most] for end in ends]
    return 0, []


def test_the_longest_match_of_a_text() -> None:
    source = random.Random(2)
    lengths = set()
    for _ in range(300):
        text = [source.randrange(3) for _ in range(source.randrange(1, 60))]
        found = own_places(np.array(text, np.int32), 4)
        length, places = places_of(text, text, 4)
        assert found == (length, places[-MOST_PLACES:])
        lengths.add(length)
    assert lengths >= {0, 2, 5}
    gap = np.array([5, 6, -1, 7, 5, 6], np.int32)
    assert own_places(gap, 3) == (2, [[-1, 7, 5]])


def test_the_longest_match_of_recent_outputs() -> None:
    source = random.Random(3)
    recent = RecentOutputs()
    texts = []
    for _ in range(4):
        number = recent.open()
        text = [source.randrange(4) for _ in range(12)]
        for begin in range(0, 12, 5):
            number = recent.add(number, text[begin : begin + 5])
        texts.append(text)
    for _ in range(200):
        tail = [source.randrange(4) for _ in range(source.randrange(1, 6))]
        each = [places_of(text, tail, 3) for text in texts]
        best = max(length for length, _ in each)
        wanted = [place for length, places in each if length == best for place in places] if best else []
        length, found = recent.longest(tail, 3)
        assert (length, sorted(found)) == (best, sorted(wanted)), tail


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are forgotten in parts, the oldest first, also those that still grow."""
    monkeypatch.setattr(suffix, "SEGMENT_TOKENS", 40)
    source = random.Random(4)
    recent = RecentOutputs(kept=200)
    numbers = [recent.open() for _ in range(3)]
    for _ in range(2000):
        row = source.randrange(3)
        numbers[row] = recent.add(numbers[row], [source.randrange(50), 7])
        assert len(recent) <= 200
    kept = sum(max(len(text) - 1, 0) for text in recent._texts.values())
    assert sum(map(len, recent._places.values())) <= kept
    assert len(recent._texts) <= 10
    tail = recent._texts[numbers[0]][-5:-1]
    assert recent.longest(tail, 2)[0] >= len(tail)
    for number in numbers:
        recent.close(number)
    empty = recent.open()
    recent.close(empty)
    assert empty not in recent._texts


def test_most_places_decide_and_the_last_on_a_tie() -> None:
    assert most_common([[1, 2], [1, 3], [4, 4]], 3) == [1, 3]
    assert most_common([[1], [2]], 3) == [2]
    assert most_common([[1, -1, 5]], 3) == [1]
    assert most_common([[1, 2, 3]], 2) == [1, 2]
    assert most_common([], 2) == []


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="on a CPU alone"):
        suffix.SuffixProposer(None, None, 1, None, torch.device("meta"))  # type: ignore[arg-type]
