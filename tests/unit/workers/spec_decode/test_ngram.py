"""N-gram speculation through core and worker: the output of the plain run, in fewer steps."""

from itertools import takewhile

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from atom_ops import NO_DRAFT, NgramRule, TokenHistory, propose_ngrams
from atom_ops.ops.sampling.draft_inputs import state_case
from tests.helpers.checkpoints.tiny_models import save_tiny, tiny
from tests.helpers.engine.drafting import PLAIN, check_few_blocks, drafting_engine
from tests.helpers.engine.varied_requests import check, run
from workers.layers.attention.cache_groups import RowGroup, RowShape
from workers.spec_decode.ngram import row_drafts
from workers.spec_decode.text_history import TextGroup, text_group

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    *("llama-gqa", "mistral-window", "gpt-oss", "qwen3-moe"),
    *("deepseek-v2-lite", "deepseek-v3.2", "deepseek-v4", "glm-5"),
)
NGRAM = SpeculativeConfig("ngram", 4, 3, 2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, 30) for name in FAMILIES), pytest.param("llama-gqa", 200, marks=pytest.mark.slow)],
)
def test_the_output_is_the_plain_runs(checkpoints: dict[str, Checkpoint], name: str, number: int) -> None:
    plain, made = drafting_engine(checkpoints[name], PLAIN), drafting_engine(checkpoints[name], NGRAM)
    wanted = run(plain, number)
    check(run(made, number, wanted), wanted)
    stats = made.core.stats()
    assert 0.9 * stats.num_draft_tokens > sum(stats.num_accepted_tokens_per_pos)
    assert sum(stats.num_accepted_tokens_per_pos) > 0.2 * stats.num_draft_tokens > 10
    assert stats.steps < 0.95 * plain.core.stats().steps


def test_preempted_and_cached_requests(checkpoints: dict[str, Checkpoint]) -> None:
    check_few_blocks(checkpoints["llama-gqa"], NGRAM, blocks=36, requests=40)


def test_a_long_pattern_is_accepted_as_a_whole(checkpoints: dict[str, Checkpoint]) -> None:
    """A model that may only say one token: every draft is right."""
    only = LogitsProcessors(allowed_ids=pack_ids([7]))
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logits_processors=only)
    made = drafting_engine(checkpoints["llama-gqa"], NGRAM)
    made.add(0, [7] * 12, 40, sampling=sampling)
    made.run()
    assert made.outputs[0].token_ids == [7] * 40
    stats = made.core.stats()
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_draft_tokens
    assert stats.generated_tokens > 1.5 * stats.steps


def test_a_prediction_is_drafted(checkpoints: dict[str, Checkpoint]) -> None:
    """The prediction is the output itself, and the prompt has nothing to look up."""
    prompt = list(range(20, 32))
    plain = drafting_engine(checkpoints["qwen3-moe"], PLAIN)
    plain.add(0, prompt, 24)
    plain.run()
    wanted = plain.outputs[0].token_ids
    steps = []
    for prediction in ([], prompt[-3:] + wanted):
        made = drafting_engine(checkpoints["qwen3-moe"], NGRAM)
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


def test_the_text_is_in_a_group_without_a_window() -> None:
    groups = [RowGroup([0], [RowShape(8)], window=16), RowGroup([1], [RowShape(8, 4)])]
    assert text_group(groups) == TextGroup(1, 0)
    assert text_group(groups[:1]) == TextGroup(0, 16)
