"""Steps with drafts on a GPU: graphs of rows x (1 + drafts), eager steps and the plain run agree."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.core_side import GREEDY, CoreSide
from tests.helpers.tiny_models import MAX_MODEL_LEN, engine_config, prompt_of, save_tiny, tiny
from workers.pending_step import PendingStep
from workers.worker import Worker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCKS, BLOCK_SIZE, COUNT = 400, 16, 40
FAMILIES = ("qwen3", "mistral-window", "gpt-oss", "qwen3-moe", "deepseek-v2-lite", "deepseek-v3.2")
HOT = Sampling(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=7)
LIMITED = Sampling(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, seed=7, logprobs=1)
PENALISED = Sampling(
    0.7, 0, 1.0, 0.0, 7, logits_processors=LogitsProcessors(frequency_penalty=0.3, bad_words=[[3], [4, 5]])
)
SETTINGS = {"greedy": GREEDY, "hot": HOT, "limited": LIMITED, "penalised": PENALISED}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    yield {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}
    backend.resolve(CPU)


def config(sizes: str, num_drafts: int) -> EngineConfig:
    base = engine_config(block_size=BLOCK_SIZE)
    return dataclasses.replace(
        base,
        device=DeviceConfig(device="cuda", cudagraph_capture_sizes=sizes),
        speculative=SpeculativeConfig("ngram", num_drafts, 3, 2) if num_drafts else SpeculativeConfig(),
    )


def worker(checkpoint: Checkpoint, sizes: str, num_drafts: int) -> tuple[Worker, int]:
    """A worker in float32, where the tokens do not depend on the shape of a step, and its KV groups."""
    made = Worker(config(sizes, num_drafts), checkpoint, Mesh(GPU), lambda *progress: None)
    groups = len(made.load().kv_specs)
    made.allocate(AllocateKV([BLOCKS] * groups, MAX_MODEL_LEN))
    return made, groups


def prompts() -> list[list[int]]:
    """Prompts of different lengths; half of them repeat a pattern."""
    return [prompt_of(3 + 5 * row, seed=row) if row % 2 else prompt_of(4, seed=row) * 5 for row in range(7)]


def run(
    made: tuple[Worker, int],
    num_drafts: int,
    sampling: Sampling,
    in_flight: int = 1,
    predicted: Sequence[Sequence[int]] = (),
) -> tuple[list[list[int]], int]:
    """The first COUNT tokens of each prompt, and the steps; rows join one after another."""
    core = CoreSide(BLOCKS, BLOCK_SIZE, groups=made[1], num_drafts=num_drafts)
    pending: deque[PendingStep] = deque()
    waiting, steps, planned = deque(enumerate(prompts())), 0, [0] * len(prompts())
    while True:
        if waiting and steps >= 3 * waiting[0][0]:
            row, prompt = waiting.popleft()
            text = pack_ids([*prompt[-3:], *predicted[row]]) if predicted else b""
            core.add(row, prompt, sampling, max_length=len(prompt) + COUNT, prediction_ids=text)
        counts = {
            row: max(1, min(16, core.known[row] - core.computed[row]))
            for row in core.tokens
            if len(core.generated(row)) + planned[row] < COUNT
        }
        if len(pending) < in_flight and counts:
            batch = core.plan(counts)
            for row in core._sampling_rows:
                planned[row] += 1
            pending.append(made[0].execute(batch))
            steps += 1
        elif pending:
            for row, _ in core._in_flight[0]:
                planned[row] -= 1
            core.add_result(pending.popleft().result())
        elif not waiting:
            return [core.generated(row)[:COUNT] for row in range(len(prompts()))], steps
        else:
            steps += 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_drafts_change_no_token(checkpoints: dict[str, Checkpoint], name: str, setting: str) -> None:
    sampling = SETTINGS[setting]
    wanted, plain_steps = run(worker(checkpoints[name], "[]", 0), 0, sampling)
    assert len({token for row in wanted for token in row}) > 20
    predicted = [[token if at % 9 else token + 1 for at, token in enumerate(row)] for row in wanted]
    for num_drafts in (1, 4):
        for sizes in ("[]", "[1,2,4,8]"):
            made = worker(checkpoints[name], sizes, num_drafts)
            for in_flight in (1, 2):
                found, steps = run(made, num_drafts, sampling, in_flight, predicted)
                same = sum(a == b for a, b in zip(found, wanted, strict=True))
                assert same == len(wanted), (sizes, num_drafts, in_flight, same)
                assert steps < 0.9 * plain_steps


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sizes", ["[]", "[1,4,16]"])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_no_step_synchronises(checkpoints: dict[str, Checkpoint], sizes: str, setting: str) -> None:
    """Prompt chunks next to rows with drafts, then steps with drafts alone."""
    made, groups = worker(checkpoints["qwen3"], sizes, 3)
    steps = [{0: 20, 1: 8}, {0: 1, 1: 12, 2: 3}, {0: 1, 1: 1, 2: 19}, *[{0: 1, 1: 1, 2: 1}] * 8, {0: 1, 2: 1}]

    def launch_all() -> list[list[int]]:
        core = CoreSide(BLOCKS, BLOCK_SIZE, groups=groups, num_drafts=3)
        for row, length in enumerate((20, 20, 22)):
            core.add(row, prompt_of(4, seed=row) * 5 + [1] * (length - 20), SETTINGS[setting], max_length=80)
        pending = [made.execute(core.plan(counts)) for counts in steps]
        torch.cuda.set_sync_debug_mode("default")
        for step in pending:
            core.add_result(step.result())
        return [core.generated(row) for row in range(3)]

    first = launch_all()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert launch_all() == first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    speculation = made._runner._inputs.speculation
    assert speculation is not None and speculation.state.positions_N[-1] == -1
