"""Recurrent layers with drafts: the states of rejected ones are forgotten; the output is the plain run's."""

import dataclasses

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.tiny_models import place, save_tiny, tiny
from tests.helpers.engine.drafting import PLAIN, check_few_blocks, drafting_engine, rarely, unchanging
from tests.helpers.engine.drafting_steps import GREEDY, LIMITED, DraftingSteps, simulate_gpu
from tests.helpers.engine.varied_requests import check, run
from workers.batch.draft_states import captured_draft_states

pytestmark = pytest.mark.usefixtures("one_thread")

NGRAM = unchanging(SpeculativeConfig("ngram", 4, 3, 2))
FAMILIES = ("qwen3-next", "qwen3.5", "kimi-linear")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


@pytest.mark.parametrize("name", ["qwen3-next", rarely("qwen3.5"), "kimi-linear"])
def test_the_output_is_the_plain_runs(checkpoints: dict[str, Checkpoint], name: str) -> None:
    plain = drafting_engine(checkpoints[name], PLAIN)
    made = drafting_engine(checkpoints[name], NGRAM)
    wanted = run(plain, 20)
    check(run(made, 20, wanted), wanted)
    stats = made.core.stats()
    assert 0.9 * stats.num_draft_tokens > sum(stats.num_accepted_tokens_per_pos)
    assert sum(stats.num_accepted_tokens_per_pos) > 0.1 * stats.num_draft_tokens > 10


def test_preempted_and_cached_requests(checkpoints: dict[str, Checkpoint]) -> None:
    """Prompts continue from saved states."""
    check_few_blocks(checkpoints["qwen3-next"], NGRAM, blocks=30, requests=30, predicts=True)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("qwen3-next", "FULL_DECODE_ONLY"), rarely("qwen3.5", "FULL")],
)
def test_graphs_keep_a_state_after_each_draft(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    """As on a GPU: the host does not know how many drafts were accepted."""
    checkpoint = checkpoints[name]
    device = DeviceConfig("cpu", cpu_threads=1, cudagraph_capture_sizes="[]")
    plain = DraftingSteps(checkpoint, device, place())
    wanted = {name: plain.run(sampling) for name, sampling in (("greedy", GREEDY), ("limited", LIMITED))}
    simulate_gpu(monkeypatch)
    for sizes in ("[]", "[1,2,4,8]"):
        device = dataclasses.replace(device, cudagraph_capture_sizes=sizes, cudagraph_mode=mode)
        made = DraftingSteps(
            checkpoint, device, place(), dataclasses.replace(NGRAM, num_speculative_tokens=3)
        )
        for name, tokens in wanted.items():
            predicted = [[token if at % 9 else 1 for at, token in enumerate(row)] for row in tokens]
            sampling = {"greedy": GREEDY, "limited": LIMITED}[name]
            for in_flight in (1, 2):
                assert made.run(sampling, in_flight, predicted) == tokens, (sizes, name, in_flight)
        assert made.accepted > 0.2 * made.verified > 10


def test_padding_rows_have_no_state() -> None:
    slots_R = torch.tensor([3, -1])
    starts_R1 = torch.arange(3, dtype=torch.int32)
    plan = captured_draft_states(slots_R, torch.tensor([2, 1]), 4, 3, starts_R1)
    assert plan.num_tokens == 6 and plan.query_starts_R1.tolist() == [0, 3, 6]
    parts = plan.parts
    assert parts is not None
    assert [part.tokens_P.tolist() for part in parts] == [[0, 3], [1, 4], [2, 5]]
    assert [part.plan.starts_from_R.tolist() for part in parts] == [[14, -1], [12, -1], [13, -1]]
    assert [part.plan.slots_R.tolist() for part in parts] == [[12, -1], [13, -1], [14, -1]]
