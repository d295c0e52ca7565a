"""Engines whose drafts a model proposes, and what it proposes in each step."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import engine_config, hf_greedy, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.varied_requests import check, run
from tests.helpers.engine.whole_engine import WholeEngine
from tests.helpers.parallel.thread_ranks import ThreadCommunicator, ThreadGroup
from workers.worker import Worker

PLAIN = SpeculativeConfig()
REQUESTS = 8


def rarely(*values: Any) -> Any:
    """A case of `make test-models` alone."""
    return pytest.param(*values, marks=pytest.mark.models)


def save_noisy(source: Path, target: Path) -> None:
    """Save the tiny model in `source` with slightly other weights in the folder `target`."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor * (1 + 0.03 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


@dataclass(frozen=True)
class SavedPair:
    """A tiny model, and the same with slightly other weights, which drafts well for it."""

    built: Any
    checkpoint: Checkpoint
    noisy: Path

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """What the model generates after these ids, as a draft model."""
        return hf_greedy(self.built, ids, count).ids if count else []

    def noisy_drafts(self, ids: list[int], count: int) -> list[int]:
        """The same of the other one."""
        return hf_greedy(AutoModelForCausalLM.from_pretrained(self.noisy), ids, count).ids if count else []


def saved_pairs(families: Sequence[str], directories: pytest.TempPathFactory) -> dict[str, SavedPair]:
    """A pair of each family."""
    saved = {}
    for name in families:
        directory, noisy = (directories.mktemp(f"{name}{kind}") for kind in ("", "-noisy"))
        built, checkpoint = save_tiny(tiny(name), directory)
        save_noisy(directory, noisy)
        saved[name] = SavedPair(built, checkpoint, noisy)
    return saved


def drafting_engine(
    checkpoint: Checkpoint,
    speculative: SpeculativeConfig,
    blocks: int = 400,
    ranks: int = 1,
    **limits: int,
) -> WholeEngine:
    """An engine of 1 or 2 ranks with that many blocks in each KV group; `limits` of `WholeEngine`."""
    if ranks == 2:
        made = cast(Worker, PairOfRanks(checkpoint, speculative))
    else:
        made = drafting_worker(checkpoint, speculative)
    return WholeEngine(made, blocks, **{"max_tokens": 96, "max_rows": 12} | limits)


def drafting_worker(checkpoint: Checkpoint, speculative: SpeculativeConfig) -> Worker:
    """A worker on one rank that has not loaded its model."""
    config = dataclasses.replace(engine_config(), speculative=speculative)
    return Worker(config, checkpoint, place(), lambda *progress: None)


def recorded(made: WholeEngine) -> list[tuple[int, list[int]]]:
    """(position of the last id, drafts) of row 0 after each step that samples, as the engine runs."""
    speculation: Any = made._worker._runner._inputs.speculation
    verify = speculation.verify
    found = []

    def verify_and_record(*arguments: Any) -> Any:
        verified = verify(*arguments)
        state = speculation.state
        if (position := int(state.positions_N[0])) >= 0:
            found.append((position, state.drafts_NK[0].tolist()))
        return verified

    speculation.verify = verify_and_record
    return found


def check_drafts(made: WholeEngine, drafts_of: Callable[[list[int], int], list[int]], count: int) -> int:
    """Run a prompt in chunks, whose drafts cross blocks; returns the number of steps that sampled.

    Raises AssertionError unless every draft is that of `drafts_of`(ids, number), and a row near its limit
    has fewer drafts than `count`.
    """
    found = recorded(made)
    prompt = prompt_of(37, 5)
    made.add(0, prompt, 24)
    made.run()
    text = prompt + made.outputs[0].token_ids
    assert len(text) == 61 and found[0][0] == 37
    for position, drafts in found:
        usable = max(min(count, len(text) - 2 - position), 0)
        with torch.no_grad():
            assert drafts[:usable] == drafts_of(text[: position + 1], usable), position
        assert drafts[usable:] == [-1] * (count - usable)
    return len(found)


def check_output(checkpoint: Checkpoint, speculative: SpeculativeConfig, least: float) -> None:
    """Requests of all kinds get the plain run's output, and more than that fraction of drafts is accepted."""
    wanted = run(drafting_engine(checkpoint, PLAIN), REQUESTS)
    made = drafting_engine(checkpoint, unchanging(speculative))
    check(run(made, REQUESTS), wanted)
    assert accepted_share(made) > least


def check_few_blocks(
    checkpoint: Checkpoint,
    speculative: SpeculativeConfig,
    blocks: int,
    requests: int,
    predicts: bool = False,
) -> None:
    """With so few that requests are preempted and prompts come from the prefix cache: the plain run's output.

    `predicts`: half of the requests predict it.
    """
    wanted = run(drafting_engine(checkpoint, PLAIN), requests)
    made = drafting_engine(checkpoint, speculative, blocks)
    check(run(made, requests, wanted if predicts else None), wanted)
    stats = made.core.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert sum(stats.num_accepted_tokens_per_pos) > 0


def unchanging(speculative: SpeculativeConfig) -> SpeculativeConfig:
    """The same, with all drafts in every step."""
    return dataclasses.replace(speculative, spec_decode_adaptive=False)


def accepted_share(made: WholeEngine) -> float:
    """Accepted drafts as a fraction of the verified ones."""
    stats = made.core.stats()
    assert stats.num_draft_tokens > 10
    return sum(stats.num_accepted_tokens_per_pos) / stats.num_draft_tokens


class PairOfRanks:
    """A worker on two tensor-parallel ranks, as `WholeEngine` uses one: threads of this process."""

    def __init__(self, checkpoint: Checkpoint, speculative: SpeculativeConfig):
        self._group = ThreadGroup(2)
        self._pool = ThreadPoolExecutor(2)
        self._checkpoint = checkpoint
        self._config = dataclasses.replace(engine_config(tp=2), speculative=speculative)

        def make(rank: int) -> Worker:
            mesh = Mesh(torch.device("cpu"), tp=ThreadCommunicator(rank, self._group))
            return Worker(self._config, checkpoint, mesh, lambda *progress: None)

        self._workers = [make(rank) for rank in range(2)]

    def load(self) -> Any:
        return self._on_both(lambda worker: worker.load())

    def allocate(self, allocate: Any) -> None:
        self._on_both(lambda worker: worker.allocate(allocate))

    def execute(self, batch: Any) -> Any:
        return self._on_both(lambda worker: worker.execute(batch))

    @property
    def _model(self) -> Any:
        return self._workers[0]._model

    @property
    def _runner(self) -> Any:
        return self._workers[0]._runner

    @property
    def tiers(self) -> None:
        """No KV is kept outside the cache."""

    @property
    def leases(self) -> None:
        """No other engine reads the cache."""

    def _on_both(self, run: Callable[[Worker], Any]) -> Any:
        """The result of rank 0."""

        def guarded(worker: Worker) -> Any:
            try:
                return run(worker)
            except BaseException:
                self._group.abort()
                raise

        first, _ = self._pool.map(guarded, self._workers)
        return first
