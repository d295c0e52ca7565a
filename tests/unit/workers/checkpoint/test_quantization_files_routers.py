"""Routers that are quantized like the other matrices: tokens equal those of the dequantized numbers."""

import re
from pathlib import Path

import pytest

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints import quantized_formats
from tests.helpers.checkpoints.four_bits import FOUR_BIT_MODELS, awq, gptq
from tests.helpers.checkpoints.quantized_formats import StoredFormat, save_quantized
from tests.helpers.checkpoints.tiny_models import Tiny, engine_config, hf_greedy, place, prompt_of
from tests.helpers.engine.whole_engine import WholeEngine
from workers.checkpoint.prepare import prepare
from workers.worker import Worker

_MODEL = next(model for model in FOUR_BIT_MODELS if model.model_type == "qwen3_moe")
# Words have eight outputs.
MODEL = Tiny(_MODEL.name, _MODEL.model_type, _MODEL.seed, _MODEL.config | {"num_experts": 8})
PROMPT = prompt_of(11, 4)


@pytest.mark.parametrize("format", [awq(32), gptq(32, act_order=True)], ids=lambda format: format.name)
@pytest.mark.parametrize("routers", [True, False])
def test_routers_are_stored_as_the_files_say(
    tmp_path: Path, format: StoredFormat, routers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if routers:
        pattern = re.compile(quantized_formats.QUANTIZED.pattern + r"|\.mlp\.gate\.weight$")
        monkeypatch.setattr(quantized_formats, "QUANTIZED", pattern)
    theirs = save_quantized(MODEL, format, tmp_path)
    model = ModelConfig(model=str(tmp_path))
    checkpoint = prepare(model, tmp_path / "cache", lambda *progress: None)
    worker = Worker(engine_config(), checkpoint, place(), lambda *progress: None)
    engine = WholeEngine(worker, (60,))
    engine.add(0, PROMPT, 8)
    engine.run()
    assert engine.outputs[0].token_ids == hf_greedy(theirs, PROMPT, 8).ids
