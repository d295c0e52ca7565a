"""N-gram speculation through core and worker: the output of the plain run, in fewer steps."""

import dataclasses
import random
from itertools import takewhile
from typing import Any

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from atom_ops import NO_DRAFT, NgramRule, TokenHistory, propose_ngrams
from atom_ops.ops.sampling.draft_inputs import state_case
from tests.helpers.tiny_models import VOCAB, engine_config, place, save_tiny, tiny
from tests.helpers.whole_engine import Output, WholeEngine
from workers.spec_decode.ngram import row_drafts
from workers.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    *("llama-gqa", "mistral-window", "gpt-oss", "qwen3-moe"),
    *("deepseek-v2-lite", "deepseek-v3.2", "glm-5"),
)
NGRAM = SpeculativeConfig("ngram", 4, 3, 2)


def engine(checkpoint: Checkpoint, speculative: SpeculativeConfig, blocks: int = 400) -> WholeEngine:
    config = dataclasses.replace(engine_config(), speculative=speculative)
    made = Worker(config, checkpoint, place(), lambda *progress: None)
    groups = 2 if checkpoint.model_type == "gpt_oss" else 1
    return WholeEngine(made, [blocks] * groups, max_tokens=96, max_rows=12)


def processors(kind: int) -> LogitsProcessors | None:
    return {
        1: LogitsProcessors(frequency_penalty=0.4, presence_penalty=0.3),
        2: LogitsProcessors(repetition_penalty=1.3),
        3: LogitsProcessors(min_tokens=7, end_ids=[5, 6, 7]),
        4: LogitsProcessors(bias_ids=pack_ids([3, 9]), bias_values=[2.5, -4.0], bad_words=[[8], [10, 11]]),
        5: LogitsProcessors(allowed_ids=pack_ids(range(10, 30)), frequency_penalty=0.2),
    }.get(kind)


def add_requests(made: WholeEngine, number: int, expected: dict[int, Output]) -> None:
    """Prompts that repeat a pattern or share one, with every parameter that sampling has.

    With an expected output, half of the requests predict it, with mistakes.
    """
    source = random.Random(3)
    shared = [source.randrange(VOCAB) for _ in range(20)]
    for owner in range(0, 2 * number, 2):
        pattern = [source.randrange(VOCAB) for _ in range(source.randrange(2, 6))]
        prompt = (pattern * 8)[: source.randrange(1, 24)]
        if source.random() < 0.3:
            prompt = shared + prompt
        sampling = Sampling(
            temperature=source.choice([0.0, 0.0, 0.3, 0.7]),
            top_k=source.choice([0, 0, 5]),
            top_p=source.choice([1.0, 1.0, 0.9]),
            min_p=source.choice([0.0, 0.0, 0.05]),
            seed=owner,
            logits_processors=processors(source.randrange(12)),
            logprobs=source.choice([-1, -1, 0, 2]),
        )
        more: dict[str, Any] = {}
        if source.random() < 0.2:
            more["stop_token_ids"] = [5, 6, 7]
        mistakes, predicts = random.Random(owner), source.random() < 0.5
        if predicts and expected:
            text = [*prompt[-3:], *expected[owner].token_ids]
            text = [mistakes.randrange(VOCAB) if mistakes.random() < 0.1 else token for token in text]
            more["prediction_ids"] = pack_ids(text)
        count, n = source.randrange(1, 30), source.choice([1, 1, 1, 2])
        prompt_logprobs = 1 if owner % 14 == 0 and n == 1 else -1
        made.add(owner, prompt, count, prompt_logprobs, sampling, n, **more)


def run(made: WholeEngine, number: int, expected: dict[int, Output] | None = None) -> dict[int, Output]:
    add_requests(made, number, expected or {})
    made.run()
    assert made.core.stats().kv_blocks_used == 0
    return made.outputs


def check(found: dict[int, Output], wanted: dict[int, Output]) -> None:
    assert found.keys() == wanted.keys()
    for number, output in found.items():
        assert output.token_ids == wanted[number].token_ids, f"request {number}"
        assert output.logprobs == pytest.approx(wanted[number].logprobs, abs=1e-4)
        assert output.prompt_logprobs == pytest.approx(wanted[number].prompt_logprobs, abs=1e-4)
        assert not output.error


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, 30) for name in FAMILIES), pytest.param("llama-gqa", 200, marks=pytest.mark.slow)],
)
def test_the_output_is_the_plain_runs(checkpoints: dict[str, Checkpoint], name: str, number: int) -> None:
    plain, made = engine(checkpoints[name], SpeculativeConfig()), engine(checkpoints[name], NGRAM)
    wanted = run(plain, number)
    check(run(made, number, wanted), wanted)
    stats = made.core.stats()
    assert 0.9 * stats.num_draft_tokens > sum(stats.num_accepted_tokens_per_pos)
    assert sum(stats.num_accepted_tokens_per_pos) > 0.2 * stats.num_draft_tokens > 10
    assert stats.steps < 0.95 * plain.core.stats().steps


def test_preempted_and_cached_requests(checkpoints: dict[str, Checkpoint]) -> None:
    """With few blocks, requests are preempted and prompts come from the prefix cache."""
    name = "llama-gqa"
    plain, made = engine(checkpoints[name], SpeculativeConfig()), engine(checkpoints[name], NGRAM, blocks=36)
    check(run(made, 40), run(plain, 40))
    stats = made.core.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert sum(stats.num_accepted_tokens_per_pos) > 0


def test_a_long_pattern_is_accepted_as_a_whole(checkpoints: dict[str, Checkpoint]) -> None:
    """A model that may only say one token: every draft is right."""
    only = LogitsProcessors(allowed_ids=pack_ids([7]))
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logits_processors=only)
    made = engine(checkpoints["llama-gqa"], NGRAM)
    made.add(0, [7] * 12, 40, sampling=sampling)
    made.run()
    assert made.outputs[0].token_ids == [7] * 40
    stats = made.core.stats()
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_draft_tokens
    assert stats.generated_tokens > 1.5 * stats.steps


def test_a_prediction_is_drafted(checkpoints: dict[str, Checkpoint]) -> None:
    """The prediction is the output itself, and the prompt has nothing to look up."""
    prompt = list(range(20, 32))
    plain = engine(checkpoints["qwen3-moe"], SpeculativeConfig())
    plain.add(0, prompt, 24)
    plain.run()
    wanted = plain.outputs[0].token_ids
    steps = []
    for prediction in ([], prompt[-3:] + wanted):
        made = engine(checkpoints["qwen3-moe"], NGRAM)
        made.add(0, prompt, 24, prediction_ids=pack_ids(prediction))
        made.run()
        assert made.outputs[0].token_ids == wanted
        steps.append(made.core.stats().steps)
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize("reach", [0, 9])
def test_one_row_has_the_drafts_that_the_operator_proposes(reach: int) -> None:
    generator = torch.Generator().manual_seed(reach)
    blocks = torch.randperm(40 * 6, generator=generator, dtype=torch.int32)
    history = TokenHistory(
        torch.randint(0, 3, (40 * 6 * 4 + 1,), generator=generator, dtype=torch.int32),
        blocks.view(40, 6),
        torch.randint(0, 3, (40, 9), generator=generator, dtype=torch.int32),
        torch.randint(0, 10, (40,), generator=generator),
        4,
        reach,
    )
    found = 0
    for rule in (NgramRule(5, 2), NgramRule(3, 3), NgramRule(2, 1)):
        state = state_case(40, 6, 4, 4, generator)
        state.ids_N.remainder_(3)
        rows = torch.arange(40)
        wanted = propose_ngrams(rows, state, history, rule, 24).tolist()
        for row in rows.tolist():
            drafts = row_drafts(row, state, history, rule).tolist()
            assert drafts == [*takewhile(lambda token: token != NO_DRAFT, wanted[row])], (rule, row)
            found += len(drafts)
    assert found > 50
