"""Every configuration of every family with numbers of ranks that do not divide it: split, or refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.fields import ConfigError
from atom.shared.config.tensor_parallel import check_tensor_parallel
from atom_ops import backend
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import TINY_MODELS, Tiny, checkpoint_of, engine_config, tiny_config
from tests.helpers.parallel.layouts import IN_TWO_GROUPS, ROWS
from workers.checkpoint.families import architectures
from workers.rank_model import build_rank, rank_dispatch

META = torch.device("meta")


def checkpoint(model: Tiny, directory: Path) -> Checkpoint:
    """Without weights."""
    config = tiny_config(model)
    config.architectures = list(architectures()[model.model_type][:1])
    config.save_pretrained(directory)
    return checkpoint_of(directory)


def refusal(model: Tiny, ranks: int, expert_parallel: bool, directory: Path) -> str:
    """Why a rank refused; empty if every rank built its share."""
    base, found = engine_config(ranks), checkpoint(model, directory)
    config = replace(base, parallel=replace(base.parallel, enable_expert_parallel=expert_parallel))
    for rank in range(ranks):
        tp = Communicator(rank, ranks)
        mesh = Mesh(META, tp=tp, ep=tp)
        try:
            build_rank(config, found, mesh, rank_dispatch(config, mesh))
        except ValueError as error:
            return str(error)
    return ""


def is_refused_before_workers_start(directory: Path, ranks: int) -> bool:
    try:
        check_tensor_parallel(ranks, checkpoint_of(directory).hf_config)
    except ConfigError as error:
        assert f"--tensor-parallel-size {ranks} does not fit the model's " in str(error)
        return True
    return False


@pytest.mark.parametrize("ranks", [3, 5])
def test_every_configuration_is_split_or_refused_with_the_flag(ranks: int, tmp_path: Path) -> None:
    backend.resolve(torch.device("cpu"))
    refused: dict[str, str] = {}
    for model in TINY_MODELS:
        for expert_parallel in (False, True):
            why = refusal(model, ranks, expert_parallel, tmp_path / model.name)
            assert "\n" not in why
            if not expert_parallel:
                assert bool(why) == is_refused_before_workers_start(tmp_path / model.name, ranks), why
            if why:
                flags = (f"--tensor-parallel-size {ranks} ", "--enable-expert-parallel: ")
                assert any(flag in why for flag in flags) and ("at most" in why or "omit" in why), why
                refused[model.name] = why
    if ranks == 3:
        assert refused.keys() & set(ROWS.values()) == {ROWS[family] for family in IN_TWO_GROUPS}
    else:
        assert refused.keys() == {model.name for model in TINY_MODELS}
