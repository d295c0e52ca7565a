"""A request sent again as its prompt and what it had generated ends exactly as the undisturbed run."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from atom.shared.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    LogitsProcessors,
    Sampling,
    TokenDeltas,
    pack_ids,
)
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.whole_engine import Output, WholeEngine
from workers.worker import Worker

COUNT = 20
CUTS = (1, 2, 3, 4, 5, 11, 18, 19)
"""Around the ends of blocks of four tokens, and up to the last token."""
PROMPT = prompt_of(21, 3)
TOLERANCE = 1e-4
HOT = Sampling(1.3, 0, 1.0, 0.0, seed=11, sequence=2, logprobs=0)
PENALTIES = LogitsProcessors(repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.3)


@dataclass
class Record(Output):
    finished: Finished | None = None
    has_first: bool = False


class Engine(WholeEngine):
    """Also records first tokens and ends."""

    def submit(self, number: int, ids: list[int], **fields: Any) -> Record:
        message = AddRequest([number], pack_ids(ids), **{"max_tokens": COUNT, "sampling": HOT} | fields)
        assert self.core.add(message, b"a") is None
        record = self.outputs[number] = Record()
        return record

    def _add(self, deltas: TokenDeltas) -> None:
        super()._add(deltas)
        for finished in deltas.finished:
            self._record(finished.request_id).finished = finished
        for first in deltas.first:
            self._record(first.request_id).has_first = True

    def _record(self, number: int) -> Record:
        record = self.outputs[number]
        assert isinstance(record, Record)
        return record


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    _, checkpoint = save_tiny(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))
    return Worker(engine_config(), checkpoint, place(), lambda *progress: None)


def with_processors(processors: LogitsProcessors, **changes: Any) -> Sampling:
    return msgspec.structs.replace(HOT, logits_processors=processors, **changes)


def undisturbed(worker: Worker, fields: dict[str, Any]) -> Record:
    engine = Engine(worker, [64])
    record = engine.submit(1, PROMPT, **fields)
    engine.run()
    return record


def check(worker: Worker, caching: bool, **fields: Any) -> Record:
    """Cut after each of `CUTS` tokens, all resumed together; returns the undisturbed run."""
    whole = undisturbed(worker, fields)
    engine = Engine(worker, [256], caching=caching)
    cuts = [cut for cut in CUTS if cut < len(whole.token_ids)]
    resumed = {
        cut: engine.submit(cut, PROMPT + whole.token_ids[:cut], prompt_length=len(PROMPT), **fields)
        for cut in cuts
    }
    engine.run()
    assert cuts
    for cut, record in resumed.items():
        assert record.token_ids == whole.token_ids[cut:]
        expected = [whole.logprobs[place] for place in range(cut, len(whole.logprobs))]
        assert [*record.logprobs.values()] == pytest.approx(expected, abs=TOLERANCE)
        assert record.finished is not None and whole.finished is not None
        assert record.finished.reason == whole.finished.reason
        assert not record.has_first
    return whole


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.0, 0, 1.0, 0.0, 0, logprobs=0),
        HOT,
        with_processors(PENALTIES),
        with_processors(PENALTIES, temperature=0.0),
        with_processors(LogitsProcessors(bad_words=[[5, 6], [7, 8, 9], [3]])),
    ],
    ids=["greedy", "seed", "penalties", "greedy penalties", "bad words"],
)
def test_the_remaining_tokens_are_those_of_the_undisturbed_run(
    worker: Worker, sampling: Sampling, caching: bool
) -> None:
    whole = check(worker, caching, sampling=sampling)
    assert len(whole.token_ids) == COUNT and whole.finished == Finished(1, FinishReason.MAX_TOKENS)


def test_penalties_change_the_output(worker: Worker) -> None:
    """The comparison above would not notice a resumed request without its penalties otherwise."""
    plain = undisturbed(worker, {"sampling": HOT})
    assert undisturbed(worker, {"sampling": with_processors(PENALTIES)}).token_ids != plain.token_ids


def test_min_tokens_counts_what_was_generated_before(worker: Worker) -> None:
    plain = undisturbed(worker, {"sampling": HOT}).token_ids
    ends = sorted(set(plain))
    processors = LogitsProcessors(min_tokens=12, end_ids=ends)
    whole = check(worker, True, sampling=with_processors(processors), stop_token_ids=ends)
    assert len(whole.token_ids) > 12


def test_a_stop_id_ends_a_resumed_request(worker: Worker) -> None:
    plain = undisturbed(worker, {"sampling": HOT}).token_ids
    whole = check(worker, True, eos_token_ids=[plain[13]])
    assert whole.finished is not None and whole.finished.reason is FinishReason.EOS


def test_prompt_log_probabilities_cover_the_prompt_alone(worker: Worker) -> None:
    whole = undisturbed(worker, {"prompt_logprobs": 0})
    engine = Engine(worker, [64])
    ids = PROMPT + whole.token_ids[:6]
    resumed = engine.submit(1, ids, prompt_length=len(PROMPT), prompt_logprobs=0)
    engine.run()
    assert resumed.token_ids == whole.token_ids[6:]
    assert resumed.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=TOLERANCE)
    assert sorted(whole.prompt_logprobs) == list(range(1, len(PROMPT)))


def test_the_resumed_sequences_of_one_request_do_not_share_their_output(worker: Worker) -> None:
    engine = Engine(worker, [64])
    ids = PROMPT + prompt_of(5, 9)
    alone = engine.submit(1, ids, prompt_length=len(PROMPT))
    engine.run()
    message = AddRequest([2, 3], pack_ids(ids), COUNT, HOT, prompt_length=len(PROMPT))
    assert engine.core.add(message, b"a") is None
    engine.outputs[2], engine.outputs[3] = Record(), Record()
    engine.run()
    assert engine.outputs[2].token_ids == alone.token_ids != engine.outputs[3].token_ids


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "words"),
    [
        (22, 9, "22 of them the prompt"),
        (-1, 9, "-1 of them the prompt"),
        (11, 10, "leave nothing of max_tokens=10"),
    ],
)
def test_a_request_with_nothing_left_to_generate_is_refused(
    worker: Worker, prompt_length: int, max_tokens: int, words: str
) -> None:
    engine = Engine(worker, [64])
    message = AddRequest([1], pack_ids(PROMPT), max_tokens, HOT, prompt_length=prompt_length)
    refusal = engine.core.add(message, b"a")
    assert refusal is not None and words in refusal.finished[0].message
