"""Whole engines on one GPU and on two, with graphs: greedy ids are transformers' on the CPU."""

from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints.reference import make_reference
from tests.helpers.checkpoints.tiny_models import tiny
from tests.helpers.engine.served import Setting, ids_of, served

ROWS = ("qwen3", "gpt-oss", "deepseek-v3", "qwen3-next")
CASES = [*((name, tp, 1) for name in ROWS for tp in (1, 2)), ("deepseek-v3", 2, 2)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize(("name", "tp", "dcp"), CASES)
def test_greedy_ids(name: str, tp: int, dcp: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    reference = make_reference(tiny(name), tmp_path)
    with served(reference, Setting(tp, tight=False, device="cuda", dcp=dcp)) as running:
        for _ in range(2):  # the second time out of the prefix cache, where there is one
            outputs, _ = running.generate(reference.prompts)
            assert ids_of(outputs) == reference.ids
