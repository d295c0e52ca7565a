"""The outputs of tiny random models do not change unintentionally.

`python -m tests.golden.test_tiny_models` records them again.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.helpers.checkpoints.rows import model_rows
from tests.helpers.checkpoints.tiny_models import TINY_MODELS, Tiny, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker

GOLDEN = Path(__file__).with_name("tiny_models.json")
PROMPT_LENGTHS = (64, 5, 37)
NEW_TOKENS = 32


def outputs(model: Tiny, directory: Path) -> list[list[int]]:
    """Greedy ids of three prompts in one batch."""
    save_tiny(model, directory)
    worker = TinyWorker(directory)
    prompts = [prompt_of(length, length) for length in PROMPT_LENGTHS]
    return generate(worker.core(), worker.execute, prompts, NEW_TOKENS, chunk=24, stagger=2)


@pytest.mark.parametrize("name", model_rows())
def test_outputs_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    assert outputs(tiny(name), tmp_path) == json.loads(GOLDEN.read_text())[name]


def record() -> None:
    """Write the outputs of every model."""
    recorded = {}
    for model in TINY_MODELS:
        with tempfile.TemporaryDirectory() as directory:
            recorded[model.name] = outputs(model, Path(directory))
    lines = (f"{json.dumps(name)}: {json.dumps(ids)}" for name, ids in recorded.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
