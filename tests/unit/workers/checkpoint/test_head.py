"""tie_word_embeddings, and what the files hold: tokens equal transformers'."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.tiny_models import engine_config, hf_greedy, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.whole_engine import WholeEngine
from workers.checkpoint.prepare import prepare
from workers.worker import Worker

Tensors = dict[str, torch.Tensor]
EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PROMPT = prompt_of(9, 1)


def _other_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDINGS].flip(0).contiguous()


def _equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDINGS].clone()


def _last_number(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
    tensors[HEAD][-1, -1] += 1


def _no_head(tensors: Tensors) -> None:
    assert HEAD not in tensors


def prepared(directory: Path, change: Callable[[Tensors], None]) -> Checkpoint:
    save_tiny(tiny("llama-mha-tied"), directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return prepare(ModelConfig(model=str(directory)), directory / "cache", lambda *progress: None)


@pytest.mark.parametrize(
    ("change", "tied"),
    [(_other_head, False), (_last_number, False), (_equal_head, True), (_no_head, True)],
)
def test_the_files_decide_as_in_transformers(
    tmp_path: Path, change: Callable[[Tensors], None], tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = prepared(tmp_path, change)
    assert checkpoint.hf_config["tie_word_embeddings"] is tied
    assert [warning for warning in checkpoint.warnings if HEAD in warning] == checkpoint.warnings
    assert len(checkpoint.warnings) == (not tied)
    with caplog.at_level(logging.CRITICAL):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    same = theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert same is tied
    worker = Worker(engine_config(), checkpoint, place(), lambda *progress: None)
    engine = WholeEngine(worker, (60,))
    engine.add(0, PROMPT, 8)
    engine.run()
    assert engine.outputs[0].token_ids == hf_greedy(theirs, PROMPT, 8).ids


def test_another_shape_or_a_quantized_head_is_its_own(tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDINGS].bfloat16()

    def quantized(tensors: Tensors) -> None:
        tensors["lm_head.qweight"] = torch.zeros(2, 2, dtype=torch.int32)

    for number, change in enumerate((narrow, quantized)):
        assert not prepared(tmp_path / str(number), change).hf_config["tie_word_embeddings"]
