"""Logits processors and log probabilities of whole requests, against transformers on the same model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from atom.shared.messages.engine import LogitsProcessors, LogprobTable, Sampling, pack_ids, unpack_ids
from atom.shared.messages.worker import AllocateKV, BatchResult, ScheduledBatch
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    VOCAB,
    engine_config,
    hf_logits,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_side import GREEDY, CoreSide, generate
from workers.sampling import sampler
from workers.worker import Worker

BLOCKS, BLOCK_SIZE = 256, 4
PROMPTS = [prompt_of(length, length) for length in (21, 5, 40)]
NEW_TOKENS = 24
Processors = Callable[[int], list[LogitsProcessor]]
"""From the length of a prompt."""


class Loaded:
    """A tiny model twice: in transformers and in a worker."""

    def __init__(self, directory: Path):
        self.reference, checkpoint = save_tiny(tiny("llama-gqa"), directory)
        self.worker = Worker(
            engine_config(block_size=BLOCK_SIZE), checkpoint, place(), lambda *progress: None
        )
        self.worker.load()
        self.worker.allocate(AllocateKV([BLOCKS], MAX_MODEL_LEN))

    def execute(self, batch: ScheduledBatch) -> bytes:
        return self.worker.execute(batch).result().token_ids

    def run(self, sampling: Sampling, chunk: int = 16, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        return generate(fresh_core(), self.execute, prompts, NEW_TOKENS, chunk, 0, sampling)

    def expected(self, prompt: list[int], processors: list[LogitsProcessor]) -> list[int]:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            scores = hf_logits(self.reference, ids)[-1:]
            for processor in processors:
                scores = processor(torch.tensor([ids]), scores)
            ids.append(int(scores[0].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


def fresh_core() -> CoreSide:
    return CoreSide(BLOCKS, BLOCK_SIZE, seed=3)


def greedy(processors: LogitsProcessors | None = None, logprobs: int = -1) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0.0, 0, logits_processors=processors, logprobs=logprobs)


def hot(processors: LogitsProcessors | None = None, seed: int = 11, logprobs: int = -1) -> Sampling:
    return Sampling(1.3, 0, 1.0, 0.0, seed, logits_processors=processors, logprobs=logprobs)


def agrees(loaded: Loaded, processors: LogitsProcessors, hf_processors: Processors) -> None:
    """Outputs equal transformers', and in all but one prompt differ from those without processors."""
    found = loaded.run(greedy(processors))
    assert found == [loaded.expected(prompt, hf_processors(len(prompt))) for prompt in PROMPTS]
    plain = loaded.run(greedy())
    assert sum(one != two for one, two in zip(found, plain, strict=True)) >= len(PROMPTS) - 1


def test_repetition_penalty(loaded: Loaded) -> None:
    processors = LogitsProcessors(repetition_penalty=1.7)
    agrees(loaded, processors, lambda length: [RepetitionPenaltyLogitsProcessor(1.7)])


def test_min_tokens(loaded: Loaded) -> None:
    ends = sorted({token for ids in loaded.run(greedy()) for token in ids[:8]})
    processors = LogitsProcessors(min_tokens=12, end_ids=ends)
    agrees(
        loaded,
        processors,
        lambda length: [MinNewTokensLengthLogitsProcessor(length, 12, ends, torch.device("cpu"))],
    )
    assert all(not set(ids[:12]) & set(ends) for ids in loaded.run(greedy(processors)))


def test_bad_words(loaded: Loaded) -> None:
    plain = loaded.run(greedy())
    words = [ids[3:5] for ids in plain] + [ids[9:13] for ids in plain] + [[ids[15]] for ids in plain]
    agrees(loaded, LogitsProcessors(bad_words=words), lambda length: [NoBadWordsLogitsProcessor(words)])


def test_allowed_ids_and_bias(loaded: Loaded) -> None:
    allowed = list(range(40, 60))
    found = loaded.run(hot(LogitsProcessors(allowed_ids=pack_ids(allowed))))
    assert {token for ids in found for token in ids} <= set(allowed)
    processors = LogitsProcessors(bias_ids=pack_ids([77]), bias_values=[100.0])
    assert loaded.run(greedy(processors)) == [[77] * NEW_TOKENS] * len(PROMPTS)


def test_presence_keeps_ids_from_coming_again(loaded: Loaded) -> None:
    found = loaded.run(greedy(LogitsProcessors(presence_penalty=1000.0)))
    assert all(len(set(ids)) == NEW_TOKENS for ids in found)
    allowed = LogitsProcessors(allowed_ids=pack_ids([1, 2, 3]), frequency_penalty=1000.0)
    for ids in loaded.run(greedy(allowed)):
        assert all(sorted(ids[i : i + 3]) == [1, 2, 3] for i in range(0, NEW_TOKENS, 3))


def test_a_row_with_every_id_excluded_samples_some_id(loaded: Loaded) -> None:
    processors = LogitsProcessors(allowed_ids=pack_ids([5]), bad_words=[[5]])
    for settings in ({}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.2}, {"temperature": 0.0}):
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, **settings}
        found = loaded.run(Sampling(**chosen, logits_processors=processors))
        assert all(0 <= token < VOCAB for ids in found for token in ids)


def test_rows_without_processors_sample_as_if_alone(loaded: Loaded) -> None:
    """Next to rows with processors, and whatever those rows held before."""
    processors = LogitsProcessors(repetition_penalty=1.9, bias_ids=pack_ids([3]), bias_values=[5.0])
    alone, processed = loaded.run(hot()), loaded.run(hot(processors))
    core = fresh_core()
    for row, prompt in enumerate(PROMPTS):
        core.add(row, prompt, hot())
        core.add(row + 8, prompt, hot(processors))
    lengths = {row: core.known[row] for row in core.known}
    core.add_sampled(loaded.execute(core.plan(lengths)))
    while len(core.generated(0)) < NEW_TOKENS:
        core.add_sampled(loaded.execute(core.plan(dict.fromkeys(lengths, 1))))
    assert [core.generated(row) for row in range(3)] == alone
    assert [core.generated(row) for row in range(8, 11)] == processed
    assert loaded.run(hot()) == alone


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_preempted_request_samples_the_same_ids(loaded: Loaded, cut: int) -> None:
    processors = LogitsProcessors(
        bad_words=[[1, 2], [7, 8, 9]],
        min_tokens=15,
        end_ids=list(range(20, 40)),
        repetition_penalty=1.4,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    )
    whole = loaded.run(hot(processors), prompts=PROMPTS[:1])[0]
    core = fresh_core()
    core.add(0, prompt_of(9, 1), hot(processors))
    core.add_sampled(loaded.execute(core.plan({0: 9})))
    core.add(2, PROMPTS[0] + whole[:cut], hot(processors), generated=cut)
    while core.computed[2] < core.known[2]:
        core.add_sampled(loaded.execute(core.plan({2: min(8, core.known[2] - core.computed[2])})))
    while len(core.generated(2)) < NEW_TOKENS - cut:
        core.add_sampled(loaded.execute(core.plan({0: 1, 2: 1})))
    assert core.generated(2) == whole[cut:]


def columns(table: LogprobTable) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    ids = np.frombuffer(table.ids, "<i4").reshape(-1, table.width)
    values = np.frombuffer(table.values, "<f4").reshape(-1, table.width)
    return ids, values, np.frombuffer(table.ranks, "<i4")


def check(table: LogprobTable, logits: torch.Tensor, tokens: list[int], top: int) -> None:
    """The table is that of `tokens`, each after its row of logits."""
    ids, values, ranks = columns(table)
    expected = logits.log_softmax(-1)
    best = expected.topk(top).indices
    assert ids[:, 0].tolist() == tokens and ids[:, 1 : 1 + top].tolist() == best.tolist()
    wanted = expected.gather(1, torch.from_numpy(ids.astype(np.int64)))
    torch.testing.assert_close(torch.from_numpy(values.copy()), wanted, atol=1e-4, rtol=0)
    rank = (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(-1) + 1
    assert ranks.tolist() == rank.tolist()


def test_logprobs_of_sampled_tokens(loaded: Loaded) -> None:
    """They come from the model's own logits, processors or not; rows without `logprobs` have none."""
    processors = LogitsProcessors(presence_penalty=1.5, bias_ids=pack_ids([9]), bias_values=[3.0])
    core = fresh_core()
    samplings = {0: hot(logprobs=2), 1: hot(), 2: hot(processors, logprobs=5)}
    for row, sampling in samplings.items():
        core.add(row, PROMPTS[row], sampling)
    results = [loaded.worker.execute(core.plan({row: len(PROMPTS[row]) for row in samplings})).result()]
    core.add_sampled(results[0].token_ids)
    for _ in range(6):
        results.append(loaded.worker.execute(core.plan(dict.fromkeys(samplings, 1))).result())
        core.add_sampled(results[-1].token_ids)
    for step, result in enumerate(results):
        assert result.logprobs is not None and result.logprobs.indices == [0, 2]
        sampled = unpack_ids(result.token_ids)
        befores = [core.tokens[row][: core.known[row] + step] for row in (0, 2)]
        logits = torch.stack([hf_logits(loaded.reference, before)[-1] for before in befores])
        check(result.logprobs.table, logits, [sampled[0], sampled[2]], top=5)


def test_logprobs_of_the_token_alone(loaded: Loaded) -> None:
    core = fresh_core()
    core.add(0, PROMPTS[0], greedy(logprobs=0))
    result = loaded.worker.execute(core.plan({0: len(PROMPTS[0])})).result()
    assert result.logprobs is not None and result.logprobs.table.width == 1
    check(
        result.logprobs.table,
        hf_logits(loaded.reference, PROMPTS[0])[-1:],
        [*unpack_ids(result.token_ids)],
        0,
    )


def test_a_width_beyond_the_vocabulary_is_all_of_it(loaded: Loaded) -> None:
    core = fresh_core()
    core.add(0, PROMPTS[0], greedy(logprobs=VOCAB + 10))
    result = loaded.worker.execute(core.plan({0: len(PROMPTS[0])})).result()
    assert result.logprobs is not None and result.logprobs.table.width == 1 + VOCAB


def prompt_chunks(loaded: Loaded, ids: list[int], chunks: list[int]) -> list[BatchResult]:
    """A row with prompt log probabilities, next to a decoding one and a prompt without them."""
    core = fresh_core()
    core.add(4, PROMPTS[1], GREEDY)
    core.add_sampled(loaded.execute(core.plan({4: len(PROMPTS[1])})))
    core.add(2, ids, GREEDY, prompt_logprobs=3)
    core.add(6, prompt_of(70, 6), GREEDY)
    results = []
    for chunk in chunks:
        results.append(loaded.worker.execute(core.plan({6: 2, 4: 1, 2: chunk})).result())
        core.add_sampled(results[-1].token_ids)
    results.append(loaded.worker.execute(core.plan({4: 1, 2: 1})).result())
    return results


@pytest.mark.parametrize("chunks", [[33], [16, 17], [1, 31, 1], [11] * 3, [1] * 33], ids=str)
@pytest.mark.parametrize("logits_at_a_time", [1 << 24, 5 * VOCAB])
def test_prompt_logprobs(
    loaded: Loaded, chunks: list[int], logits_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token from the second on has its entry once, however the prompt is cut."""
    monkeypatch.setattr(sampler, "_LOGITS_PER_SLICE", logits_at_a_time)
    ids = prompt_of(33, 1)
    logits = hf_logits(loaded.reference, ids)
    position = 1
    for result in prompt_chunks(loaded, ids, chunks):
        for chunk in result.prompt_logprobs:
            assert chunk.owner == 2 and chunk.start == position
            end = position + len(chunk.table.ranks) // 4
            check(chunk.table, logits[position - 1 : end - 1], ids[position:end], top=3)
            position = end
    assert position == len(ids)


def test_prompt_logprobs_of_several_rows_in_a_step_that_samples_nothing(loaded: Loaded) -> None:
    core = fresh_core()
    prompts = {1: prompt_of(30, 1), 5: prompt_of(20, 5), 9: prompt_of(1, 9)}
    for row, top in ((1, 0), (5, 4)):
        core.add(row, prompts[row], GREEDY, prompt_logprobs=top)
    result = loaded.worker.execute(core.plan({5: 12, 1: 9})).result()
    assert result.token_ids == b"" and result.logprobs is None
    assert [(chunk.owner, chunk.start) for chunk in result.prompt_logprobs] == [(5, 1), (1, 1)]
    for chunk, row, count in zip(result.prompt_logprobs, (5, 1), (12, 9), strict=True):
        logits = hf_logits(loaded.reference, prompts[row])[:count]
        check(chunk.table, logits, prompts[row][1 : count + 1], top=4)


def test_a_prompt_of_one_token_has_no_prompt_logprobs(loaded: Loaded) -> None:
    core = fresh_core()
    core.add(0, [7], GREEDY, prompt_logprobs=1)
    result = loaded.worker.execute(core.plan({0: 1})).result()
    assert result.prompt_logprobs == [] and len(result.token_ids) == 4


def test_a_resumed_row_has_logprobs_of_its_prompt_alone(loaded: Loaded) -> None:
    core = fresh_core()
    ids = prompt_of(30, 2)
    core.add(0, ids, GREEDY, generated=10, prompt_logprobs=1)
    (chunk,) = loaded.worker.execute(core.plan({0: 30})).result().prompt_logprobs
    check(chunk.table, hf_logits(loaded.reference, ids)[:19], ids[1:20], top=1)
