"""A model that drafts, in every way to launch steps, and on two ranks."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom_ops import SamplingBatch, backend, native_impl
from parallel.communicator import Communicator
from tests.helpers.checkpoints.tiny_models import place
from tests.helpers.engine.drafting import rarely
from tests.helpers.engine.drafting_steps import SIMULATED, DraftingSteps, check_pair, save_pair, simulate_gpu
from tests.unit.workers.spec_decode.test_speculation import (
    CPU,
    VOCAB,
    Driver,
    Markov,
    TwoTokensBack,
    runner,
    triples_of,
)
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.step_inputs import StepInputs
from workers.graphs.prompt_graphs import PromptGraphs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.embedding import VocabEmbedding
from workers.layers.linear import ReplicatedLinear
from workers.spec_decode import adaptive
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, ModelProposer, relative_cost
from workers.spec_decode.proposer import Proposer

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = 8


class Twin(Drafter):
    """Drafts as the target of these tests computes, from a cache of its own.

    With pairs it caches, in the slot of each token, the id after it. So every draft is right, unless a token
    was written to a wrong slot, or read from one.
    """

    groups = (1,)
    cost = 0.0

    def __init__(self, reads_pairs: bool):
        self.reads_pairs = reads_pairs
        self._model = TwoTokensBack()

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        ids_T = next_ids_T if self.reads_pairs else computed.ids_T
        return self._compute(ids_T, computed.positions_T, computed.context)

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._compute(ids_R, positions_R, ctx)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return CausalLM.sample(cast(CausalLM, self._model), hidden_RD, settings, positions_R)

    def _compute(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self._model(ids_T, positions_T, ForwardContext([], ctx.groups[1:]))


@pytest.fixture(scope="module")
def plain() -> Driver:
    made = Driver(runner(0), 0, 1, REQUESTS)
    made.run()
    return made


def make(
    way: str,
    drafter: Drafter,
    num_drafts: int,
    adapts: bool = False,
    captured: Sequence[int] = (),
    forced_length: float | None = None,
) -> Driver:
    """Requests whose drafts `drafter` proposes."""

    def drafts(limits: BatchLimits, tables: list[BlockTable], exact: bool) -> Proposer:
        return ModelProposer(drafter, limits, tables, CPU, exact)

    sizes = {"graphs": [1, 2, 4, 6], "some graphs": [3], "exact, recorded": [1, 2, 4, 6]}.get(way)
    made = runner(num_drafts, way.startswith("exact"), sizes, captured, drafts, adapts, forced_length)
    driver = Driver(made, num_drafts, 2, REQUESTS)
    driver.core.lookahead = num_drafts - drafter.reads_pairs
    driver.core.sends_next_ids = drafter.reads_pairs
    return driver


@pytest.mark.parametrize(
    ("way", "num_drafts"),
    [("exact", 1), ("exact", 4), ("upper bounds", 4), ("graphs", 4), ("some graphs", 4)],
)
@pytest.mark.parametrize("reads_pairs", [True, False], ids=["pairs", "tokens"])
def test_drafts_of_the_target_are_accepted(
    plain: Driver, way: str, reads_pairs: bool, num_drafts: int
) -> None:
    """Greedy and sampled rows, with drafts in blocks that the step itself does not need."""
    driver = make(way, Twin(reads_pairs), num_drafts)
    assert driver.run() == plain.outputs
    # Logits processors, which drafts do not have, change some tokens; the first pair lacks a token.
    assert driver.num_accepted > 0.6 * driver.num_proposed > 50


class Failing(Twin):
    """Its drafts of the first positions are wrong."""

    def __init__(self, reads_pairs: bool, wrong_until: int):
        super().__init__(reads_pairs)
        self.sampled: list[int] = []
        """Positions of all drafts."""
        self._wrong_until = wrong_until

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        self.sampled += positions_R.tolist()
        ids_R = super().sample(hidden_RD, settings, positions_R)
        return torch.where(positions_R < self._wrong_until, (ids_R + 1) % VOCAB, ids_R)


@pytest.mark.parametrize(("way", "reads_pairs"), [("exact", True), ("exact, recorded", False)])
def test_rows_whose_drafts_fail_have_none_for_a_while(
    plain: Driver, monkeypatch: pytest.MonkeyPatch, way: str, reads_pairs: bool
) -> None:
    """The model follows them nevertheless: later drafts are accepted."""
    monkeypatch.setattr(adaptive, "SHORTEST_PAUSE", 6)
    failing = Failing(reads_pairs, 25)
    driver = make(way, failing, 4, adapts=True, captured=[0])
    assert driver.run() == plain.outputs
    early = sum(position < 25 for position in failing.sampled)
    assert early < 60, "nothing is computed for rows without drafts; with four in each step it is 400"
    late = len(failing.sampled) - early
    assert driver.num_accepted > 0.5 * late > 10


@pytest.mark.parametrize("way", ["upper bounds", "graphs"])
@pytest.mark.parametrize("reads_pairs", [True, False], ids=["pairs", "tokens"])
def test_steps_without_drafts_only_follow(plain: Driver, way: str, reads_pairs: bool) -> None:
    """In a pause of the core nothing is predicted; the drafts after it are as good as before."""
    drafter = Failing(reads_pairs, 0)
    driver = make(way, drafter, 4, captured=[4, 0])
    driver.turns = random.Random(3)
    assert driver.run() == plain.outputs
    assert driver.num_accepted > 0.6 * driver.num_proposed > 50


@pytest.mark.parametrize(
    "name", [name if name.startswith(("eagle3", "dflash")) else rarely(name) for name in SIMULATED]
)
def test_models_that_draft_in_graphs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tests/gpu/test_speculation.py` does on a GPU."""
    simulate_gpu(monkeypatch)

    def make(checkpoint: Checkpoint, speculative: SpeculativeConfig, sizes: str) -> DraftingSteps:
        device = DeviceConfig(
            device="cpu",
            cpu_threads=1,
            cudagraph_capture_sizes=sizes,
            cudagraph_mode="FULL_DECODE_ONLY",
        )
        return DraftingSteps(checkpoint, device, place(), speculative)

    check_pair(save_pair(name, tmp_path), make, ["[1,2,4,8]"], [3], ["greedy", "limited"])


@pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "name", ["draft_model llama-gqa", *map(rarely, ("eagle3 llama-gqa", "dspark llama-gqa"))]
)
def test_small_steps_with_drafts_are_recorded_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have different numbers of drafts; steps with more tokens, and with prompts, are among them."""
    replayed: list[int] = []
    forward = PromptGraphs.forward

    def counted(graphs: PromptGraphs, step: StepInputs, *size: int) -> torch.Tensor:
        replayed.append(len(step.ids_T))
        return forward(graphs, step, *size)

    monkeypatch.setattr(PromptGraphs, "forward", counted)

    def make(checkpoint: Checkpoint, speculative: SpeculativeConfig, sizes: str) -> DraftingSteps:
        device = DeviceConfig(
            device="cpu", cpu_threads=1, cudagraph_capture_sizes=sizes, cudagraph_mode="FULL_DECODE_ONLY"
        )
        return DraftingSteps(checkpoint, device, place(), speculative)

    check_pair(save_pair(name, tmp_path), make, ["[1,4]"], [3], ["limited"])
    assert len(set(replayed)) > 10 and max(replayed) <= 32


class NearlyMarkov(Drafter):
    """Draws from distributions near those of `Markov`, with the row's noise."""

    groups = (0,)
    cost = 0.0

    def __init__(self, reads_pairs: bool):
        self.reads_pairs = reads_pairs
        self._model = Markov()
        generator = torch.Generator().manual_seed(6)
        self._model.logits = self._model.logits + torch.randn(5, 5, generator=generator)

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        ids_T = next_ids_T if self.reads_pairs else computed.ids_T
        return ids_T[:, None].float()

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return ids_R[:, None].float()

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return CausalLM.sample(cast(CausalLM, self._model), hidden_RD, settings, positions_R)


@pytest.mark.parametrize(("reads_pairs", "exact"), [(True, True), rarely(False, True), rarely(False, False)])
def test_the_distribution_is_the_targets(reads_pairs: bool, exact: bool) -> None:
    """20,000 draws whose drafts another distribution proposes, with the same noise."""
    accepted = triples_of(
        lambda limits, table: ModelProposer(NearlyMarkov(reads_pairs), limits, [table], CPU, exact),
        exact=exact,
        lookahead=3 - reads_pairs,
        sends_next_ids=reads_pairs,
    )
    assert 2_000 < accepted < 30_000, "some drafts are accepted, and some are not"


def test_a_cost_counts_the_weights_of_a_pass() -> None:
    backend.resolve(CPU, ["torch"])  # whose weights have no padding
    build = BuildContext(torch.float32, CPU, Communicator(), 16)
    layers = [ReplicatedLinear(8, 4, build), ReplicatedLinear(8, 12, build)]
    for layer in layers:
        layer.process_weights_after_loading()
    assert relative_cost(layers[:1], layers) == 0.25
    embedding = VocabEmbedding(100, 8, build)
    assert relative_cost([embedding, layers[0]], [embedding, *layers]) == 0.25, "few rows of it are read"
