"""What the steps at start compute."""

from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints.vision_models import MODELS, build, save
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.batch.step_inputs import StepInputs
from workers.model_runner import ModelRunner


@pytest.mark.parametrize("model_type", MODELS)
def test_an_image_is_read_before_the_first_request(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build(model_type), tmp_path)
    steps: list[StepInputs] = []
    compute = ModelRunner._compute

    def counted(runner: ModelRunner, step: StepInputs) -> torch.Tensor:
        steps.append(step)
        return compute(runner, step)

    monkeypatch.setattr(ModelRunner, "_compute", counted)
    worker = TinyWorker(tmp_path).worker
    shown = [step for step in steps if step.images is not None]
    assert [len(step.ids_T) for step in shown] == [len(steps[1].ids_T)], "one, as long as the plain prompt"
    images = worker._builder.images
    assert images is not None and not images._features
