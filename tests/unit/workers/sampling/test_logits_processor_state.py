"""Logits processors, against the definition written with plain Python."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids, unpack_ids
from atom.shared.messages.worker import NewRow
from atom_ops.ops.sampling import logits_processors as logits_processors_op
from workers.batch.block_table import BatchLimits
from workers.sampling.logits_processor_state import LogitsProcessorState

CPU = torch.device("cpu")
VOCAB = 12
LIMITS = BatchLimits(max_rows=100, max_model_len=40, block_size=4)
IDS = st.integers(0, VOCAB - 1)
ID_LISTS = st.lists(IDS, max_size=6)
PLAIN = Sampling(0.0, 0, 1.0, 0.0, 0)


@st.composite
def logits_processors(draw: st.DrawFn) -> LogitsProcessors:
    """Each processor half of the time."""

    def maybe(strategy: st.SearchStrategy, neutral: object) -> object:
        return draw(strategy) if draw(st.booleans()) else neutral

    bias = maybe(st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=4), {})
    penalty = st.floats(-2, 2, width=32)
    return LogitsProcessors(
        allowed_ids=pack_ids(maybe(ID_LISTS, [])),
        bad_words=maybe(st.lists(st.lists(IDS, min_size=1, max_size=4), max_size=5), []),
        min_tokens=maybe(st.integers(0, 6), 0),
        end_ids=maybe(ID_LISTS, []),
        bias_ids=pack_ids(bias),
        bias_values=list(bias.values()),
        repetition_penalty=maybe(st.floats(0.125, 4, width=32), 1.0),
        frequency_penalty=maybe(penalty, 0.0),
        presence_penalty=maybe(penalty, 0.0),
    )


@dataclass
class Sequence:
    """One request, and its processed logits by the definition."""

    processors: LogitsProcessors | None
    prompt: list[int]
    generated: list[int] = field(default_factory=list)

    def new_row(self, row: int) -> NewRow:
        sampling = Sampling(0.0, 0, 1.0, 0.0, 0, logits_processors=self.processors)
        known, processors = len(self.prompt) + len(self.generated), self.processors
        prompt = pack_ids(set(self.prompt)) if processors and processors.needs_prompt_ids else b""
        output = pack_ids(self.generated) if processors and processors.needs_output_ids else b""
        return NewRow(row, known, 0, [[]], sampling, len(self.prompt), -1, prompt, output)

    def expected(self, logits: list[float]) -> list[float]:
        processors = self.processors
        assert processors is not None
        allowed, forbidden = set(unpack_ids(processors.allowed_ids)), set()
        if len(self.generated) < processors.min_tokens:
            forbidden |= set(processors.end_ids)
        for word in processors.bad_words:
            if len(word) == 1 or self.generated[-(len(word) - 1) :] == word[:-1]:
                forbidden.add(word[-1])
        bias = dict(zip(unpack_ids(processors.bias_ids), processors.bias_values, strict=True))
        found = []
        for token, logit in enumerate(logits):
            if token in forbidden or (allowed and token not in allowed):
                logit = -math.inf
            logit += bias.get(token, 0.0)
            if token in self.prompt or token in self.generated:
                logit = (
                    logit / processors.repetition_penalty
                    if logit > 0
                    else logit * processors.repetition_penalty
                )
            logit -= processors.frequency_penalty * self.generated.count(token)
            logit -= processors.presence_penalty * (token in self.generated)
            found.append(logit)
        return found


SEQUENCES = st.builds(
    Sequence,
    st.none() | logits_processors(),
    st.lists(IDS, min_size=1, max_size=8),
    st.lists(IDS, max_size=6),
)


def step(state: LogitsProcessorState, rows: dict[int, Sequence], sampled: list[int], seed: int) -> None:
    """Compare the logits of all rows, then record their sampled ids."""
    order = np.array(list(rows), np.int64)
    positions = np.array([len(s.prompt) + len(s.generated) for s in rows.values()], np.int64)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows_U = state.gather(order)
    which = [i for i, sequence in enumerate(rows.values()) if sequence.processors]
    assert (rows_U is None) == (not which)
    if rows_U is not None:
        before, positions_R = logits.clone(), torch.from_numpy(positions)
        found = state.apply(rows_U, logits, positions_R, positions)
        sequences = list(rows.values())
        expected = [sequences[i].expected(logits[i].tolist()) for i in which]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=1e-5)
        assert torch.equal(before, logits)
        ids = torch.tensor(sampled)[which]
        state.record(rows_U, positions_R[which], ids)
    for sequence, token in zip(rows.values(), sampled, strict=True):
        sequence.generated.append(token)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(SEQUENCES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 7), SEQUENCES), max_size=4),
    st.lists(ID_LISTS.filter(len), min_size=4, max_size=12),
)
def test_logits_processors_follow_their_definition(
    first: list[Sequence], later: list[tuple[int, Sequence]], sampled: list[list[int]]
) -> None:
    """Rows are set to other requests between steps, and some steps leave out a row."""
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    rows = dict(enumerate(first))
    for row, sequence in rows.items():
        state.set_row(sequence.new_row(row))
    for number, ids in enumerate(sampled):
        if number % 3 == 2 and later:
            row, sequence = later.pop()
            state.set_row(sequence.new_row(row))
            rows[row] = sequence
        running = {row: rows[row] for row in rows if len(rows) == 1 or row != number % len(rows)}
        step(state, running, (ids * len(rows))[: len(running)], seed=number)


def test_a_resumed_row_has_the_same_logits() -> None:
    processors = LogitsProcessors(
        bad_words=[[3, 4, 5]],
        min_tokens=6,
        end_ids=[7],
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    sequence = Sequence(processors, [1, 1, 2, 9])
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    state.set_row(sequence.new_row(0))
    for number, token in enumerate([5, 3, 4, 3, 4]):
        if number == 3:
            state.set_row(Sequence(processors, [8], [8, 8]).new_row(0))  # another request meanwhile
            state.set_row(sequence.new_row(2))
        step(state, {2 if number >= 3 else 0: sequence}, [token], seed=number)


def test_a_row_keeps_nothing_of_its_former_request() -> None:
    penalised = LogitsProcessors(repetition_penalty=2.0, frequency_penalty=2.0, bad_words=[[1, 2]])
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    for number in range(3):
        former = Sequence(penalised, [1, 2, 3, 4, 5])
        state.set_row(former.new_row(0))
        for token in (1, 6, 7, 1):
            step(state, {0: former}, [token], seed=number)
        state.set_row(Sequence(None, [1]).new_row(0))
        assert state.gather(np.array([0])) is None
        step_of_new = Sequence(penalised, [9])
        state.set_row(step_of_new.new_row(0))
        step(state, {0: step_of_new}, [2], seed=number)


def test_no_request_needs_new_memory_for_its_record() -> None:
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    before = [state._record.ids_ML.data_ptr(), state._record.seen_MV.data_ptr()]
    processors = LogitsProcessors(presence_penalty=1.0, bad_words=[[1, 2]])
    for row in range(LIMITS.max_rows):
        state.set_row(Sequence(processors, [1, 2]).new_row(row))
    rows = {row: Sequence(processors, [1, 2]) for row in range(LIMITS.max_rows)}
    step(state, rows, [3] * len(rows), seed=0)
    assert [state._record.ids_ML.data_ptr(), state._record.seen_MV.data_ptr()] == before


def test_penalties_in_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processors_op, "_RECORD_SLICE", 8)
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    penalised = LogitsProcessors(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    rows = {row: Sequence(penalised, [row % VOCAB, 3], [5, 5, row % VOCAB]) for row in range(7)}
    for row, sequence in rows.items():
        state.set_row(sequence.new_row(row))
    for seed in range(3):
        step(state, rows, [seed] * len(rows), seed)


def test_bad_words_do_not_match_the_prompt() -> None:
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    sequence = Sequence(LogitsProcessors(bad_words=[[2, 3, 4]], repetition_penalty=1.25), [5, 2])
    state.set_row(sequence.new_row(0))
    step(state, {0: sequence}, [3], seed=0)
    found = state.apply(state.gather(np.array([0])), torch.zeros(1, VOCAB), torch.tensor([3]), np.array([3]))
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_biases_are_added_in_float32(dtype: torch.dtype) -> None:
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    processors = LogitsProcessors(bias_ids=pack_ids([2]), bias_values=[0.001])
    state.set_row(Sequence(processors, [1]).new_row(0))
    rows_U = state.gather(np.array([0]))
    found = state.apply(rows_U, torch.full((1, VOCAB), 30.0, dtype=dtype), torch.tensor([1]), np.array([1]))
    assert found.argmax() == 2


def test_nan_logits_give_logits_of_the_right_shape() -> None:
    state = LogitsProcessorState(LIMITS, VOCAB, CPU)
    sequence = Sequence(
        LogitsProcessors(bad_words=[[1, 2], [3]], presence_penalty=1.0, min_tokens=3), [1], [1]
    )
    state.set_row(sequence.new_row(0))
    rows_U = state.gather(np.array([0]))
    found = state.apply(rows_U, torch.full((1, VOCAB), math.nan), torch.tensor([2]), np.array([2]))
    assert found.shape == (1, VOCAB)
