"""Steps with drafts on a GPU: graphs of rows x (1 + drafts), eager steps and the plain run agree."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.drafting_steps import (
    PAIRS,
    PLAIN,
    SETTINGS,
    DraftingSteps,
    check_pair,
    check_repeated,
    save_pair,
)

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FAMILIES = (
    *("qwen3", "mistral-window", "gpt-oss", "qwen3-moe", "deepseek-v2-lite", "deepseek-v3.2"),
    *("qwen3-next", "qwen3.5", "kimi-linear"),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", autouse=True)
def cpu_afterwards() -> Iterator[None]:
    yield
    backend.resolve(CPU)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


def ngram(num_drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("ngram", num_drafts, 3, 2)


SUFFIX = SpeculativeConfig("suffix", 4)


def steps(checkpoint: Checkpoint, speculative: SpeculativeConfig, sizes: str) -> DraftingSteps:
    device = DeviceConfig(device="cuda", cudagraph_capture_sizes=sizes)
    return DraftingSteps(checkpoint, device, Mesh(GPU), speculative)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_drafts_change_no_token(checkpoints: dict[str, Checkpoint], name: str, setting: str) -> None:
    sampling = SETTINGS[setting]
    plain = steps(checkpoints[name], PLAIN, "[]")
    wanted = plain.run(sampling)
    assert len({token for row in wanted for token in row}) > 20
    predicted = [[token if at % 9 else token + 1 for at, token in enumerate(row)] for row in wanted]
    for num_drafts in (1, 4):
        for sizes in ("[]", "[1,2,4,8]"):
            made = steps(checkpoints[name], ngram(num_drafts), sizes)
            for in_flight in (1, 2):
                found = made.run(sampling, in_flight, predicted)
                same = sum(a == b for a, b in zip(found, wanted, strict=True))
                assert same == len(wanted), (sizes, num_drafts, in_flight, same)
                assert made.steps < 0.9 * plain.steps


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_recent_outputs_are_drafted(checkpoints: dict[str, Checkpoint], name: str, setting: str) -> None:
    """By kernels in the step: outputs that are repeated take fewer steps."""
    sampling = SETTINGS[setting]
    wanted = steps(checkpoints[name], PLAIN, "[]").run(sampling)
    for sizes in ("[]", "[1,2,4,8]"):
        for in_flight in (1, 2):
            check_repeated(steps(checkpoints[name], SUFFIX, sizes), sampling, in_flight, wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_models_that_draft_change_no_token(name: str, tmp_path: Path) -> None:
    check_pair(save_pair(name, tmp_path), steps, ["[]", "[1,2,4,8]"], [1, 3], list(SETTINGS))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sizes", ["[]", "[1,4,16]"])
@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("method", [ngram(3), SUFFIX], ids=["ngram", "suffix"])
def test_no_step_synchronises(
    checkpoints: dict[str, Checkpoint], sizes: str, setting: str, method: SpeculativeConfig
) -> None:
    check_never_waits(steps(checkpoints["qwen3"], method, sizes), setting)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sizes", ["[]", "[1,4,16]"])
@pytest.mark.parametrize(
    "name",
    [
        "mtp deepseek-v3",
        "mtp qwen3-next",
        "eagle3 llama-gqa",
        "draft_model gpt-oss",
        "draft_model qwen3.5",
        "draft_model-qwen3.5 llama-gqa",
    ],
)
def test_no_step_of_a_model_that_drafts_synchronises(name: str, sizes: str, tmp_path: Path) -> None:
    pair = save_pair(name, tmp_path)
    check_never_waits(steps(pair.checkpoint, pair.drafts(3), sizes), "hot")


def check_never_waits(made: DraftingSteps, setting: str) -> None:
    """Prompt chunks next to rows with drafts, then steps with drafts alone."""
    counts = [
        {0: 20, 1: 8},
        {0: 1, 1: 12, 2: 3},
        {0: 1, 1: 1, 2: 19},
        *[{0: 1, 1: 1, 2: 1}] * 8,
        {0: 1, 2: 1},
    ]

    def launch_all() -> list[list[int]]:
        core = made.core()
        for row, length in enumerate((20, 20, 22)):
            core.add(row, prompt_of(4, seed=row) * 5 + [1] * (length - 20), SETTINGS[setting], max_length=80)
        pending = [made.worker.execute(core.plan(each)) for each in counts]
        torch.cuda.set_sync_debug_mode("default")
        for step in pending:
            core.add_result(step.result())
        return [core.generated(row) for row in range(3)]

    first = launch_all()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        # Drafts from the first outputs make more tokens.
        assert all(longer[: len(row)] == row for longer, row in zip(launch_all(), first, strict=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    speculation = made.worker._runner._inputs.speculation
    assert speculation is not None and speculation.state.positions_N[-1] == -1
