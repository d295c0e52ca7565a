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
from workers.checkpoint.draft_configs import block_attention, block_fields

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}
DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 3,
    "mask_token_id": 9,
    "target_layer_ids": [0, 2],
}
DSPARK = DFLASH | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 2,
    "dflash_config": {"markov_rank": 8, "markov_head_type": "vanilla"},
}
SLIDING, FULL = ["sliding_attention"] * 4, ["full_attention"] * 4
MIXED = [*SLIDING[:1], *FULL[1:]]
READERS = {"eagle3": HEAD, "dflash": DFLASH, "dspark": DSPARK}
DEADLINE_S = 60


def saved(directory: Path, tensor: str = "weight", **changes: Any) -> Path:
    """A checkpoint of one small tensor."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET | changes))
    save_file({tensor: np.zeros(2, np.float32)}, directory / "model.safetensors")
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
    for method, config in READERS.items():
        reader = saved(tmp_path / method, **config)
        assert draft_checkpoint(drafted(method, reader), target()) is not None
    first = saved(
        tmp_path / "first", **HEAD | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100}
    )
    assert draft_checkpoint(drafted("eagle3", first), target()) is not None


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
        ("draft_model", {"architectures": ["DFlashDraftModel"]}, "use --method dflash"),
        ("eagle3", {}, "LlamaForCausalLM; --method eagle3 supports LlamaForCausalLMEagle3 and"),
        ("dspark", {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel; --method dspark supports"),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "architecture DFlash2DraftModel"),
        ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "architecture Gemma4DSparkModel"),
        ("eagle3", HEAD | {"vocab_size": 301}, "of 301 ids"),
        ("eagle3", HEAD | {"hidden_size": 32}, r"of size 32 \(hidden_size\), and the model's have 64"),
        ("eagle3", HEAD | {"target_hidden_size": 32}, r"of size 32 \(target_hidden_size\)"),
        ("eagle3", HEAD | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"\[1, 2, 4\].* the model's 4, 0"),
        ("eagle3", HEAD | {"eagle_aux_hidden_state_layer_ids": None}, r"layers \[2, 2, 1\]"),
        ("eagle3", HEAD | {"num_aux_hidden_states": 2}, r"2 distinct ones \(num_aux_hidden_states\)"),
        ("eagle3", HEAD | {"num_hidden_layers": 2}, "it has 2 layers"),
        ("eagle3", HEAD | {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ("eagle3", HEAD | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("eagle3", HEAD | {"use_sliding_window": True}, "use_sliding_window True"),
        ("eagle3", HEAD | {"parallel_drafting": True}, "parallel_drafting True"),
        ("dflash", DFLASH | {"dflash_config": {"use_swa": True}}, "sliding_window None is no whole number"),
        (
            "dflash",
            DFLASH | {"dflash_config": {"use_swa": True, "swa_window_size": 0}},
            "swa_window_size 0 is",
        ),
        (
            "dflash",
            DFLASH | {"dflash_config": {"use_swa": True}, "sliding_window": 2},
            r"layer 0 has a window of 2 tokens, less than a block \(block_size 3\)",
        ),
        (
            "dflash",
            DFLASH | {"layer_types": SLIDING, "use_sliding_window": False},
            "use_sliding_window is false",
        ),
        ("dflash", DFLASH | {"layer_types": SLIDING[:3]}, "for each of its 4 layers"),
        ("dflash", DFLASH | {"layer_types": ["odd"] * 4}, "are not full_attention or sliding_attention"),
        ("dflash", DFLASH | {"use_sliding_window": True, "max_window_layers": 3}, "sliding_window None"),
        ("dflash", DFLASH | {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias True"),
        ("dflash", DFLASH | {"is_neox_style": False}, "is_neox_style False"),
        ("dflash", DFLASH | {"speculators_model_type": "dflash"}, "format of the speculators library"),
        ("dspark", DSPARK | {"dflash_config": {"causal": True, "markov_rank": 8}}, "causal True"),
        ("dspark", DSPARK | {"layer_types": SLIDING}, "sliding_attention"),
        ("dspark", DSPARK | {"draft_vocab_size": 100}, "draft_vocab_size 100"),
        ("eagle3", HEAD | {"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ("eagle3", HEAD | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "lacks q_lora_rank, kv_lora"),
        (
            "eagle3",
            HEAD
            | {
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": {"model_type": "qwen3"},
            },
            "model_type 'qwen3'; llama is supported",
        ),
        ("dflash", DFLASH | {"hidden_size": 32}, r"of size 32 \(hidden_size\)"),
        ("dflash", DFLASH | {"block_size": 2}, r"at most 1 drafts \(block_size 2\).*-tokens is 2"),
        ("dflash", DFLASH | {"block_size": None}, "block_size None is not supported"),
        ("dflash", DFLASH | {"target_layer_ids": [0, 3]}, r"\[0, 3\] are not distinct layers .* 4, 0 to 2"),
        ("dflash", DFLASH | {"target_layer_ids": ["0"]}, "are not distinct layers"),
        ("dflash", DFLASH | {"dflash_config": {"mask_token_id": 300}}, "300 is outside the vocabulary"),
        ("dflash", DFLASH | {"dflash_config": {"fc_layernorm": True}}, "fc_layernorm True"),
        (
            "dflash",
            DFLASH | {"draft_vocab_size": 301},
            "draft_vocab_size 301 is no whole number from 1 to 300",
        ),
        ("dflash", DFLASH | {"target_hidden_size": 32}, r"of size 32 \(target_hidden_size\)"),
        (
            "dflash",
            {name: value for name, value in DFLASH.items() if name != "mask_token_id"},
            "lacks 'mask_token_id'",
        ),
        ("dspark", DSPARK | {"block_size": 1}, "at most 1 drafts"),
        ("dspark", DSPARK | {"model_type": "qwen3_5"}, "model_type 'qwen3_5'"),
        ("dspark", DSPARK | {"speculators_model_type": "dspark"}, "speculators_model_type"),
        ("dspark", DSPARK | {"dflash_config": {"markov_head_type": "rnn"}}, "markov_head_type 'rnn'"),
        ("dspark", DSPARK | {"dflash_config": {"markov_rank": 0}}, "markov_rank 0"),
        ("dspark", DSPARK | {"sample_from_anchor": False}, "sample_from_anchor False"),
        ("dspark", DSPARK | {"shift_label": False}, "shift_label False"),
    ],
)
def test_drafters_that_do_not_fit(tmp_path: Path, method: str, changes: dict[str, Any], message: str) -> None:
    directory = saved(tmp_path / "draft", **changes)
    (directory / "model.safetensors").unlink()  # weights are looked at last
    with pytest.raises(ValueError, match=rf"--draft-model {directory}: .*{message}"):
        draft_checkpoint(drafted(method, directory), target())


def test_a_head_of_another_size_has_its_own_embedding(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "target_hidden_size": 64}
    bare = saved(tmp_path / "bare", **HEAD, **sizes)
    with pytest.raises(ValueError, match=r"hidden size 32 and no embed_tokens\.weight.* size is 64"):
        draft_checkpoint(drafted("eagle3", bare), target())
    whole = saved(tmp_path / "whole", "embed_tokens.weight", **HEAD, **sizes)
    assert draft_checkpoint(drafted("eagle3", whole), target()) is not None


def test_a_block_drafter_of_another_size_or_vocabulary_has_the_tensors_for_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "target_hidden_size": 64}
    bare = saved(tmp_path / "bare", "embed_tokens.weight", **DFLASH, **sizes)
    with pytest.raises(
        ValueError, match=r"hidden size 32 and no lm_head\.weight.* LM head, whose size is 64"
    ):
        draft_checkpoint(drafted("dflash", bare), target())
    some = saved(tmp_path / "some", "d2t", **DFLASH, draft_vocab_size=100)
    with pytest.raises(
        ValueError, match=r"drafts 100 of the 300 tokens .* lacks the tensors lm_head\.weight"
    ):
        draft_checkpoint(drafted("dflash", some), target())
    assert draft_checkpoint(drafted("dflash", some), target(), load_dummy=True) is not None


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, [0, 0, 0, 0], ""),
        ({"layer_types": MIXED, "sliding_window": 9}, [9, 0, 0, 0], "0"),
        ({"layer_types": SLIDING, "sliding_window": 9, "is_causal": False}, [9, 9, 9, 9], ""),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, [0, 0, 0, 9], "3"),
        ({"use_sliding_window": True, "sliding_window": 9}, [0, 0, 0, 0], ""),
        ({"use_sliding_window": False, "sliding_window": 9}, [0, 0, 0, 0], ""),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7}, "sliding_window": 9}, [7, 7, 7, 7], ""),
        ({"use_swa": True, "layer_types": FULL, "sliding_window": 9}, [9, 9, 9, 9], ""),
        ({"use_swa": True, "layer_types": MIXED, "sliding_window": 9}, [9, 0, 0, 0], "0"),
        ({"dflash_config": {"causal": True}}, [0, 0, 0, 0], "0123"),
        ({"dflash_config": {"causal": True}, "is_causal": False}, [0, 0, 0, 0], ""),
    ],
)
def test_what_the_layers_of_block_drafters_see(
    changes: dict[str, Any], windows: list[int], causal: str
) -> None:
    """As the reference of DFlash's authors reads the fields, and vLLM those that others have added."""
    found = block_attention(block_fields(TARGET | DFLASH | changes))
    assert [layer.window or 0 for layer in found] == windows
    assert [layer.causal for layer in found] == [str(layer) in causal for layer in range(4)]


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
