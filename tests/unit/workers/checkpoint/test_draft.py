"""The checkpoint of --draft-model is checked with the model's, before an engine starts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.launch import PrepareLaunch
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import spawn
from workers.checkpoint.draft import draft_checkpoint

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
DEADLINE_S = 60


def saved(directory: Path, **changes: Any) -> Path:
    """A checkpoint of one small tensor."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET | changes))
    save_file({"weight": np.zeros(2, np.float32)}, directory / "model.safetensors")
    return directory


def target(**changes: Any) -> Checkpoint:
    config = TARGET | changes
    return Checkpoint(
        directory="model",
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype="bfloat16",
        vocab_size=300,
        max_model_len=2048,
    )


def drafted(method: Any, directory: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method, 2, draft_model=str(directory))


def test_a_draft_model_is_described_as_far_as_it_is_built(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    draft = draft_checkpoint(drafted("draft_model", directory), target())
    assert draft is not None
    assert (draft.directory, draft.model_type, draft.vocab_size) == (str(directory), "qwen3", 300)
    head = saved(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])
    assert draft_checkpoint(drafted("eagle3", head), target()) is not None


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "mtp"])
def test_methods_without_a_draft_model_read_none(method: str | None) -> None:
    """The flag without effect is refused by name, together with the other settings."""
    assert draft_checkpoint(drafted(method, Path("nowhere")), target()) is None
    assert draft_checkpoint(SpeculativeConfig("draft_model", 2), target()) is None


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "draft_model",
            {"vocab_size": 301},
            "vocabulary of 301 ids, and the model one of 300: .*same tokenizer",
        ),
        ("draft_model", {"architectures": ["Odd"]}, "architecture Odd of model type llama is not supported"),
        ("draft_model", {"model_type": "qwen3"}, "LlamaForCausalLM of model type qwen3 is not supported"),
        ("draft_model", {"architectures": []}, "config.json names no architecture"),
        (
            "draft_model",
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "qwen3_next has recurrent layers",
        ),
        ("draft_model", {"architectures": ["DFlashDraftModel"]}, "use --method dflash"),
        ("eagle3", {}, "LlamaForCausalLM; --method eagle3 supports LlamaForCausalLMEagle3 and"),
        ("dspark", {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel; --method dspark supports"),
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 301}, "of 301 ids"),
    ],
)
def test_drafters_that_do_not_fit(tmp_path: Path, method: str, changes: dict[str, Any], message: str) -> None:
    directory = saved(tmp_path / "draft", **changes)
    (directory / "model.safetensors").unlink()  # weights are looked at last
    with pytest.raises(ValueError, match=rf"--draft-model {directory}: .*{message}"):
        draft_checkpoint(drafted(method, directory), target())


def test_a_model_that_hands_out_no_hidden_states(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])
    other = target(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4")
    with pytest.raises(
        ValueError, match="eagle3 needs hidden states of the model, which deepseek_v4 does not"
    ):
        draft_checkpoint(drafted("eagle3", head), other)


def test_a_directory_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--draft-model .*: give a directory with config\.json"):
        draft_checkpoint(drafted("draft_model", tmp_path), target())
    (saved(tmp_path / "draft") / "model.safetensors").unlink()
    settings = drafted("draft_model", tmp_path / "draft")
    with pytest.raises(ValueError, match=r"--draft-model .*: .* has no safetensors files"):
        draft_checkpoint(settings, target())
    assert draft_checkpoint(settings, target(), load_dummy=True) is not None


def test_the_preparation_tells_it_once(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    settings = drafted("draft_model", saved(tmp_path / "draft", vocab_size=301))
    launch = PrepareLaunch(ModelConfig(model=str(model)), str(tmp_path / "cache"), "", settings)
    child = spawn("workers.checkpoint.prepare", launch, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        status = child.wait(timeout=DEADLINE_S)
        [line] = child.stdout.read().splitlines()
    assert status == ExitStatus.MODEL
    error = msgspec.json.decode(line)["error"]
    assert error.startswith(f"--draft-model {tmp_path / 'draft'}: it has a vocabulary of 301 ids")
