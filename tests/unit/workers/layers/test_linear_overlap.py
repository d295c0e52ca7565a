"""Steps in parts, with each part's all-reduce on its own: the ids and logits of one worker."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.communicator import Communicator
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import RankedWorkers

PROMPTS = [prompt_of(length, length) for length in (64, 5, 1, 37)]
IDS = prompt_of(50, seed=3)
LEAST, PARTS = 4, 3
DENSE = "qwen3-odd-gqa-biases-windows"
_begin = Communicator.begin_all_reduce_add_rms_norm
Sizes = dict[int, list[int]]
"""By rank the tokens of each part."""


@pytest.fixture(params=[DENSE, "gpt-oss"])
def ranked(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, RankedWorkers, Sizes]]:
    sizes: Sizes = defaultdict(list)

    def begin(
        tp: Communicator, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        sizes[tp.rank].append(len(x_TD))
        return _begin(tp, x_TD, residual_TD, weight_D, eps)

    monkeypatch.setenv("ATOM_OVERLAP_ALLREDUCE_TOKENS", str(LEAST))
    monkeypatch.setattr(Communicator, "begin_step_in_parts", lambda self, x_TD: PARTS)
    monkeypatch.setattr(Communicator, "begin_all_reduce_add_rms_norm", begin)
    save_tiny(tiny(request.param), tmp_path)
    made = RankedWorkers(tmp_path, 2, 1)
    yield request.param, made, sizes
    made.close()


def test_outputs_are_those_of_one_worker(
    ranked: tuple[str, RankedWorkers, Sizes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes and whole prompts in one step; a step of one token has no parts."""
    name, made, sizes = ranked
    monkeypatch.setenv("ATOM_OVERLAP_ALLREDUCE_TOKENS", "0")
    alone = TinyWorker(tmp_path)
    wanted = generate(alone.core(), alone.execute, PROMPTS, 12, chunk=24, stagger=2)
    assert generate(made.core(), made.execute, PROMPTS, 12, chunk=24, stagger=2) == wanted
    core = alone.core()
    core.add(0, IDS)
    wanted_TV = forced_logits(alone.worker, core, 0, [21, 1, 28])
    sizes.clear()

    def logits(rank: int) -> torch.Tensor:
        core = made.workers[rank].core()
        core.add(0, IDS)
        return forced_logits(made.workers[rank].worker, core, 0, [21, 1, 28])

    for found_TV in made.on_all(logits):
        torch.testing.assert_close(found_TV, wanted_TV, atol=2e-5, rtol=0)
    blocks = 2 * len(alone.worker._model.model.layers)
    in_parts = blocks * [7, 7, 7] + blocks * [10, 9, 9]
    # A model with experts has no parts.
    assert sizes == ({0: in_parts, 1: in_parts} if name == DENSE else {})
