"""Layers for multi-token prediction in GGUF files: the tensors of published checkpoints, and drafts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atom.shared.config.model import ModelConfig
from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.gguf_cases import Case, Type, prepared, silent
from tests.helpers.checkpoints.mtp_models import MtpModel, save_delta_mtp_model, save_mtp_model
from tests.helpers.checkpoints.tiny_models import Tiny
from tests.helpers.engine.drafting import check_drafts, drafting_engine, unchanging
from tests.unit.workers.weights.test_gguf_experts import CASES
from workers.checkpoint.prepare import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 4
NEXTN = f"blk.{LAYERS}.nextn."
MTP = {"add_block_count": LAYERS + 1, "add_nextn_predict_layers": 1}
BY_TYPE = {case.model_type: case for case in CASES}
AFTER = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
APART = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def saved(model_type: str, directory: Path, types: Mapping[str, Type] | None = None) -> MtpModel:
    """The model, as published in `directory`/published and as `directory`/m.gguf."""
    case = BY_TYPE[model_type]
    save: Callable[[Tiny, Path], MtpModel] = save_delta_mtp_model if model_type in APART else save_mtp_model
    model = save(case.row, directory / "published")
    of_layer = {name.replace("shared_head.norm", "shared_head_norm"): own for name, own in model.own.items()}
    adds_one = model_type in APART
    tensors = {
        f"{NEXTN}{name}": own.numpy() + float(adds_one and name != "eh_proj.weight")
        for name, own in of_layer.items()
    }
    copies = {
        f"{NEXTN}embed_tokens.weight": model.built.model.embed_tokens.weight.detach().numpy(),
        f"{NEXTN}shared_head_head.weight": model.built.lm_head.weight.detach().numpy(),
    }
    with_layer: Case = replace(case, tensors=tensors | copies)
    with_layer.write(directory / "m.gguf", model.built, types, **MTP)
    return model


@pytest.mark.parametrize("model_type", [*AFTER, *APART])
def test_the_layer_is_that_of_a_published_checkpoint(tmp_path: Path, model_type: str) -> None:
    saved(model_type, tmp_path)
    checkpoint = prepare(ModelConfig(model=str(tmp_path / "m.gguf")), tmp_path / "cache", silent)
    assert checkpoint.mtp_layers == 1
    assert checkpoint.hf_config["num_hidden_layers"] == LAYERS
    copies = (f"model.layers.{LAYERS}.embed_tokens.weight", f"model.layers.{LAYERS}.shared_head.head.weight")
    published = load_file(tmp_path / "published/model.safetensors")
    expected = {name: tensor for name, tensor in published.items() if name not in copies}
    made = load_file(Path(checkpoint.directory) / "model.safetensors")
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(made[name], tensor, msg=name)


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_drafts_of_a_quantized_file(tmp_path: Path, model_type: str) -> None:
    """Experts and attention of the layer are packed; its projection of pairs is not."""
    kinds = {f"model.layers.{LAYERS}.self_attn.{each}_proj.weight": Type.Q8_0 for each in "qkvo"}
    kinds |= {f"blk.{LAYERS}.ffn_{each}_exps.weight": Type.Q8_0 for each in ("gate", "up", "down")}
    model = saved(model_type, tmp_path, kinds)
    checkpoint = prepare(ModelConfig(model=str(tmp_path / "m.gguf")), tmp_path / "cache", silent)
    engine = drafting_engine(checkpoint, unchanging(SpeculativeConfig("mtp", 3)), max_tokens=16, max_rows=2)
    assert check_drafts(engine, model.drafts, 3) < 24, "no draft was accepted"


def test_a_file_without_the_tensors_of_the_layer_has_none(tmp_path: Path) -> None:
    saved("glm4_moe", tmp_path)
    case = BY_TYPE["glm4_moe"]
    model = save_mtp_model(case.row, tmp_path / "again").built
    case.write(tmp_path / "without.gguf", model, **MTP)
    checkpoint = prepare(ModelConfig(model=str(tmp_path / "without.gguf")), tmp_path / "cache", silent)
    assert checkpoint.mtp_layers == 0
    names = load_file(prepared(tmp_path / "without.gguf") / "model.safetensors")
    assert not [name for name in names if f".layers.{LAYERS}." in name]
