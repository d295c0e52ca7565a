"""Every family at its real width on the meta device, and the bytes of its decode step."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atom.shared.messages.worker import FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec
from atom_ops import backend
from benchmarks.family_runs.family_configs import FAMILIES
from benchmarks.family_runs.step_bytes import step_bytes
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import checkpoint_of, engine_config
from workers.layers.moe.moe import Experts
from workers.rank_model import build_rank, rank_dispatch, rank_specs
from workers.weights.loader import weight_bytes
from workers.weights.plan import weighted_layers

CONTEXT = 1056


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_accepted_at_its_real_width(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    backend.resolve(torch.device("meta"))
    config = engine_config(block_size=16, load_dummy=True, dtype="bfloat16")
    mesh = Mesh(torch.device("meta"))
    model = build_rank(config, checkpoint_of(tmp_path), mesh, rank_dispatch(config, mesh))
    for _, layer in weighted_layers(model):
        layer.process_weights_after_loading()
    specs = rank_specs(config, model)
    one, many, all_experts = (
        step_bytes(model, specs, rows, CONTEXT, family.experts_per_token) for rows in (1, 64, 100_000)
    )
    held = weight_bytes(model)
    assert held < 30e9
    assert one.weights <= many.weights <= held * 1.001 and many.cache == 64 * one.cache
    has_experts = any(isinstance(layer, Experts) for _, layer in weighted_layers(model))
    assert has_experts == bool(family.experts_per_token)
    assert (many.weights > 1.5 * one.weights) == has_experts
    if has_experts:
        assert all_experts.weights > many.weights


def test_a_cache_is_read_up_to_its_window_and_a_state_is_also_written() -> None:
    model = SimpleNamespace(named_modules=list)
    specs = [FullAttentionSpec(16, 1600), SlidingWindowSpec(16, 1600, 512), RecurrentStateSpec(5000)]
    found = step_bytes(model, specs, 2, 1000, 0)  # type: ignore[arg-type]
    assert (found.weights, found.cache) == (0, 2 * (100_000 + 51_200 + 10_000))
