"""Every family on several ranks, which sample the tokens of one; one process group runs all of them."""

import msgspec
import pytest
import torch

from atom.config.checkpoint import Checkpoint
from parallel.mesh import Mesh
from tests.helpers.layout_rank import Job, Outcome, run
from tests.helpers.layouts import LAYOUTS, ROWS, Layout, cases
from tests.helpers.ranks import Ranks
from tests.helpers.reference import PROMPTS
from tests.helpers.tiny_models import engine_config, save_tiny, tiny

DEADLINE_S = 240
RANKS = max(layout.ranks for layout in LAYOUTS)
SCRIPT = """
    from pathlib import Path
    from tests.helpers.layout_rank import run_all
    run_all(Path("{jobs}"), rank, {ranks})
    mesh.close()
"""
REPLICATED = {"deepseek_v2": 0.12, "deepseek_v3": 0.12, "deepseek_v32": 0.31, "glm_moe_dsa": 0.26}
"""The largest share of the weights that every rank has: projections to latents, and indexers; else 2 %."""

Case = tuple[str, Layout]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Each family's."""
    directory = tmp_path_factory.mktemp("models")
    return {family: save_tiny(tiny(row), directory / row)[1] for family, row in ROWS.items()}


@pytest.fixture(scope="module")
def outcomes(
    checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, list[Outcome]]:
    """What each rank of each case found."""
    path, base = tmp_path_factory.mktemp("jobs") / "jobs.json", engine_config()
    jobs = [Job(layout.config(base), checkpoints[family], layout, PROMPTS) for family, layout in cases()]
    path.write_bytes(msgspec.json.encode(jobs))
    ranks = Ranks()
    try:
        ranks.start(SCRIPT.format(jobs=path, ranks=RANKS), tp=RANKS, timeout=DEADLINE_S)
        outputs = ranks.outputs(DEADLINE_S)
    finally:
        ranks.kill()
    by_rank = [msgspec.json.decode(output, type=list[Outcome | None]) for output in outputs]
    of_cases = zip(*by_rank, strict=True)
    return {case: [each for each in found if each] for case, found in zip(cases(), of_cases, strict=True)}


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Checkpoint]) -> dict[str, Outcome]:
    """What one rank finds for each family."""
    config, mesh = engine_config(), Mesh(torch.device("cpu"))
    return {
        family: run(Job(config, checkpoint, Layout("1 rank"), PROMPTS), mesh)
        for family, checkpoint in checkpoints.items()
    }


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(("family", "layout"), cases(), ids=lambda value: getattr(value, "name", value))
def test_ranks_sample_the_tokens_of_one(
    family: str,
    layout: Layout,
    checkpoints: dict[str, Checkpoint],
    outcomes: dict[Case, list[Outcome]],
    alone: dict[str, Outcome],
) -> None:
    whole, found = alone[family], outcomes[family, layout]
    assert len(found) == layout.ranks
    assert len({token for ids in whole.ids for token in ids}) >= 16
    layers = checkpoints[family].hf_config["num_hidden_layers"]
    for each in found:
        assert each.ids == whole.ids
        # The embedding, and the two blocks of each layer; then a key of each sampled row.
        expected = {"all_reduce": each.steps * (1 + 2 * layers), "all_gather": each.sampled_steps}
        assert each.collectives == expected
    shares = [each.weight_bytes / whole.weight_bytes for each in found]
    replicated = REPLICATED.get(family, 0.02)
    assert 1 <= sum(shares) <= 1 + replicated * (layout.ranks - 1)
    assert max(shares) < 1 / layout.ranks + replicated + 0.1, "rank 0 has at most a group of heads more"
