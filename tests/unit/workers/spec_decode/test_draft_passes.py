"""Engines in lockstep whose drafts need all of them: the tokens of an engine alone, and equal passes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atom.shared.config.device import DeviceConfig
from atom.shared.config.parallel import ParallelConfig
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import place
from tests.helpers.engine.core_side import GREEDY
from tests.helpers.engine.drafting import rarely
from tests.helpers.engine.drafting_steps import HOT, DraftingSteps, Pair, save_pair, simulate_gpu
from tests.helpers.parallel.thread_ranks import ThreadCommunicator, ThreadGroup
from tests.unit.workers.test_shape_coordination import PlannedTokens, ThreadHost
from workers.spec_decode.draft_passes import DraftPasses

SHARED = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)


def test_ranks_have_the_passes_of_the_one_that_drafts_most() -> None:
    dispatches = [PlannedTokens() for _ in range(3)]
    ranks = [DraftPasses(dispatch) for dispatch in dispatches]
    for rank, dispatch in enumerate(dispatches):
        dispatch.dp_rank = rank
    ranks[0].plan(4, 1)
    ranks[2].plan(2, 3)
    plans = [rank.planned for rank in ranks]
    for rank in ranks:
        rank.agree(plans)
        rank.begin()
    assert [(rank.num_drafts, rank.num_rows) for rank in ranks] == [(3, 4), (3, 1), (3, 2)]
    assert [dispatch.planned for dispatch in dispatches] == [[([4, 1, 2], True)]] * 3
    assert ranks[0].planned == (0, 0), "the next step may be a dummy one"


@pytest.fixture(
    scope="module",
    params=["mtp glm4-moe", rarely("draft_model qwen3-moe"), rarely("draft_model qwen3.5-moe")],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [("[]", "NONE"), ("[1,2,4,8]", "FULL_DECODE_ONLY"), rarely("[1,2,4,8]", "FULL")],
)
def test_engines_in_lockstep_draft_alike(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, sizes: str, mode: str
) -> None:
    """As on a GPU. One engine has twice the steps; the other takes part in its passes meanwhile."""
    simulate_gpu(monkeypatch)
    device = DeviceConfig(device="cpu", cpu_threads=1, cudagraph_capture_sizes=sizes, cudagraph_mode=mode)
    plain = DraftingSteps(pair.checkpoint, device, place())
    wanted = {sampling: plain.run(sampling) for sampling in (GREEDY, HOT)}
    group, host = ThreadGroup(2), ThreadGroup(2)

    def run(rank: int) -> DraftingSteps:
        try:
            dp = ThreadCommunicator(rank, group)
            mesh = Mesh(torch.device("cpu"), dp=dp, ep=dp, host=ThreadHost(rank, host))
            made = DraftingSteps(pair.checkpoint, device, mesh, pair.drafts(3), SHARED)
            for sampling in (GREEDY, HOT)[rank:]:
                assert made.run(sampling, in_flight=1 + rank) == wanted[sampling]
            while made.worker.idle_step().shape is not None:
                pass
            return made
        except BaseException:
            for each in (group, host):
                each.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, rank) for rank in range(2)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    for future in futures:
        made = future.result()
        assert made.accepted > 0.02 * made.verified > 2
