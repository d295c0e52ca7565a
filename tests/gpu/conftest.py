"""What several files of GPU tests use."""

from collections.abc import Iterator

import pytest
import torch

from atom_ops import backend


@pytest.fixture
def released() -> Iterator[None]:
    """Afterwards ops run on the CPU, and the GPU's memory is free."""
    yield
    backend.resolve(torch.device("cpu"))
    torch.cuda.empty_cache()
