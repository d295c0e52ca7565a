"""Every family on several ranks, which sample the tokens of one; one process group runs all of them."""

from collections import Counter

import msgspec
import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from parallel.mesh import Mesh
from tests.helpers.checkpoints.reference import PROMPTS
from tests.helpers.checkpoints.tiny_models import engine_config, save_tiny, tiny
from tests.helpers.parallel.layout_rank import Job, Outcome, run
from tests.helpers.parallel.layouts import LAYOUTS, MOVING, ROWS, Layout, cases
from tests.helpers.parallel.ranks import Ranks

DEADLINE_S = 240
RANKS = max(layout.ranks for layout in LAYOUTS)
SCRIPT = """
    from pathlib import Path
    from tests.helpers.parallel.layout_rank import run_all
    run_all(Path("{jobs}"), rank)
    mesh.close()
"""
REPLICATED = {
    "deepseek_v2": 0.12, "deepseek_v3": 0.12, "glm4_moe_lite": 0.12, "mistral4": 0.12,
    "deepseek_v32": 0.31, "glm_moe_dsa": 0.26, "kimi_linear": 0.12,
    "deepseek_v4": 0.4,
}  # fmt: skip
"""The largest share of the weights that every rank has: projections to latents, and indexers; else 2 %."""
OF_A_MOE_LAYER = {
    "auto": {"all_gather": 1, "reduce_scatter": 1},
    "allgather_reducescatter": {"all_gather": 1, "reduce_scatter": 1},
    "alltoall": {"all_to_all": 3},
}
"""Collectives between engines; of variable sizes also the sizes."""

NORMS_ACROSS_HEADS = ("minimax_m2", "olmo2", "olmo3")
"""Families whose ranks also sum the squares of queries and keys in each layer."""
MOVED = "glm4_moe"
"""The family whose experts move."""

Case = tuple[str, Layout]

ALWAYS = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Families whose cases `make test` runs; `make test-models` runs all."""
CASES = [
    pytest.param(family, layout, marks=() if family in ALWAYS else pytest.mark.models)
    for family, layout in cases()
]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases that the session has selected."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return [(call["family"], call["layout"]) for call in calls if {"family", "layout"} <= call.keys()]


@pytest.fixture(scope="module")
def checkpoints(selected: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Those of the selected families."""
    directory = tmp_path_factory.mktemp("models")
    families = {family for family, _ in selected} | {MOVED}
    return {family: save_tiny(tiny(ROWS[family]), directory / family)[1] for family in sorted(families)}


@pytest.fixture(scope="module")
def outcomes(
    selected: list[Case],
    checkpoints: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Case, list[Outcome]]:
    """What each rank of each selected case found."""
    path, base = tmp_path_factory.mktemp("jobs") / "jobs.json", engine_config()
    every = [*selected, (MOVED, MOVING)]
    jobs = [Job(layout.config(base), checkpoints[family], layout, PROMPTS) for family, layout in every]
    path.write_bytes(msgspec.json.encode(jobs))
    ranks = Ranks()
    try:
        ranks.start(SCRIPT.format(jobs=path), tp=RANKS, timeout=DEADLINE_S)
        outputs = ranks.outputs(DEADLINE_S)
    finally:
        ranks.kill()
    by_rank = [msgspec.json.decode(output, type=list[Outcome | None]) for output in outputs]
    of_cases = zip(*by_rank, strict=True)
    return {case: [each for each in found if each] for case, found in zip(every, of_cases, strict=True)}


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Checkpoint]) -> dict[str, Outcome]:
    """What one rank finds for each family."""
    config, mesh = engine_config(), Mesh(torch.device("cpu"))
    return {
        family: run(Job(config, checkpoint, Layout("1 rank"), PROMPTS), mesh)
        for family, checkpoint in checkpoints.items()
    }


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(("family", "layout"), CASES, ids=lambda value: getattr(value, "name", value))
def test_ranks_sample_the_tokens_of_one(
    family: str,
    layout: Layout,
    checkpoints: dict[str, Checkpoint],
    outcomes: dict[Case, list[Outcome]],
    alone: dict[str, Outcome],
) -> None:
    whole, found = alone[family], outcomes[family, layout]
    assert len(found) == layout.ranks
    assert len({token for ids in whole.ids for token in ids}) >= 12
    layers = checkpoints[family].hf_config["num_hidden_layers"]
    for rank, each in enumerate(found):
        assert each.ids == whole.ids[rank // layout.tp :: layout.dp]
        expected: Counter[str] = Counter()
        if layout.tp > 1:
            # The embedding, the two blocks of each layer and its norm across heads; then a key of each
            # sampled row.
            a_layer = 3 if family in NORMS_ACROSS_HEADS else 2
            reduced = each.steps * (1 + a_layer * layers)
            expected.update({"all_reduce": reduced, "all_gather": each.sampled_steps})
        if layout.dp > 1:
            for _ in range(each.steps * each.moe_layers):
                expected.update(OF_A_MOE_LAYER[layout.all2all])
        if layout.dcp > 1:  # the queries of each layer, and its results
            expected.update(dict.fromkeys(("all_gather", "all_to_all"), each.cached_steps * layers))
        assert each.collectives == expected
    if layout.dp > 1:
        assert len({each.steps for each in found}) == 1, "the engines are in step"
        assert {bool(each.dummy_steps) for each in found} == {True, False}, "one of them is idle in the end"
        assert sum(each.expert_bytes for each in found) == whole.expert_bytes
        assert max(each.expert_bytes for each in found) < whole.expert_bytes
    rest = whole.weight_bytes - whole.expert_bytes * (layout.dp > 1)
    for first in range(0, layout.ranks, layout.tp):
        engine = found[first : first + layout.tp]
        shares = [(each.weight_bytes - each.expert_bytes * (layout.dp > 1)) / rest for each in engine]
        # Without the experts the replicated weights are a larger part.
        replicated = REPLICATED.get(family, 0.02) * whole.weight_bytes / rest
        assert 1 <= sum(shares) <= 1 + replicated * (layout.tp - 1)
        assert max(shares) < 1 / layout.tp + replicated + 0.1, "rank 0 has at most a group of heads more"


def test_experts_that_move_between_ranks_leave_the_tokens_as_they_are(
    outcomes: dict[Case, list[Outcome]], alone: dict[str, Outcome]
) -> None:
    """Also between the dummy steps of an engine without requests."""
    found, whole = outcomes[MOVED, MOVING], alone[MOVED]
    assert [each.ids for each in found] == [whole.ids[0::2], whole.ids[1::2]]
    assert {bool(each.dummy_steps) for each in found} == {True, False}
    first, second = (each.load for each in found)
    assert second is None, "one rank reports for all"
    assert first is not None and first.moved >= 4 and min(first.imbalance) >= 1
