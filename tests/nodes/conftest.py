"""What the tests of several nodes need."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.test_lockstep import MOE
from tests.helpers.servers.random_server import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with random weights."""
    return with_weights(write_checkpoint(tmp_path_factory.mktemp("random") / "model"))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with experts."""
    return with_weights(write_checkpoint(tmp_path_factory.mktemp("moe") / "model", **MOE))


def with_weights(directory: Path) -> str:
    """Weights in a file: dummy ones would differ from layout to layout."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.15 if weight.dim() > 1 else 1.0)
    model.save_pretrained(directory)
    return str(directory)
