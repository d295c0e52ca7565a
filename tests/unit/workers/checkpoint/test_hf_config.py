"""config.json and what the user changes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from workers.checkpoint.hf_config import with_new_names
from workers.checkpoint.prepare import prepare

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 30,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress."""


def checkpoint_of(
    directory: Path, overrides: dict[str, Any] | None, config: dict[str, Any] = CONFIG, **files: Any
) -> Checkpoint:
    for name, content in ({"config": config} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    text = None if overrides is None else json.dumps(overrides)
    model = ModelConfig(model=str(directory), load_dummy=True, hf_overrides=text)
    return prepare(model, directory / "cache", silent)


def test_overrides_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False}
    checkpoint = checkpoint_of(tmp_path, overrides)
    assert checkpoint.max_model_len == 8192
    assert overrides.items() <= checkpoint.hf_config.items()
    assert checkpoint.vocab_size == 300 and checkpoint.warnings == []


def test_no_overrides_change_nothing(tmp_path: Path) -> None:
    assert checkpoint_of(tmp_path, {}) == checkpoint_of(tmp_path, None)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": PLAIN},
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type" if name == "rope_type" else name: value for name, value in YARN.items()}},
    ],
)
def test_rope_changes_in_either_form_meet_either_form(
    tmp_path: Path, given: dict[str, Any], changes: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of(tmp_path, changes, CONFIG | given)
    assert checkpoint.hf_config["rope_parameters"] == PLAIN | YARN
    assert checkpoint.max_model_len == 4096


def test_one_setting_of_an_object_leaves_the_others(tmp_path: Path) -> None:
    config = CONFIG | {"rope_parameters": PLAIN | YARN}
    for changes in ({"rope_parameters": {"factor": 8.0}}, {"rope_scaling": {"factor": 8.0}}):
        checkpoint = checkpoint_of(tmp_path, changes, config)
        assert checkpoint.hf_config["rope_parameters"] == PLAIN | YARN | {"factor": 8.0}
        assert checkpoint.max_model_len == 8192
    assert (
        checkpoint_of(tmp_path, {"rope_theta": 1.0}, config).hf_config["rope_parameters"]["rope_theta"] == 1.0
    )


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_null_turns_scaling_off(tmp_path: Path, name: str) -> None:
    checkpoint = checkpoint_of(tmp_path, {name: None}, CONFIG | {"rope_scaling": YARN})
    assert checkpoint.hf_config["rope_parameters"]["rope_type"] == "default"
    assert checkpoint.max_model_len == 2048


def test_other_nulls_and_lists_replace(tmp_path: Path) -> None:
    config = CONFIG | {"sliding_window": 128, "layer_types": ["a", "b"]}
    read = checkpoint_of(tmp_path, {"sliding_window": None, "layer_types": ["c"]}, config).hf_config
    assert (read["sliding_window"], read["layer_types"]) == (None, ["c"])


def test_dtype_in_either_form(tmp_path: Path) -> None:
    for name in ("dtype", "torch_dtype"):
        assert checkpoint_of(tmp_path, {name: "float16"}).dtype == "float16"


def test_null_leaves_a_derived_setting_to_the_others(tmp_path: Path) -> None:
    nulls = {"head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": None}
    assert nulls.items() <= checkpoint_of(tmp_path, nulls).hf_config.items()


def test_ends_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """Else a rule that forbids the end for a while would reach beyond the logits."""
    assert checkpoint_of(tmp_path, {"eos_token_id": [2, -1, 300, 299]}).eos_token_ids == [2, 299]
    assert checkpoint_of(tmp_path, {"vocab_size": 2}).eos_token_ids == []


def test_an_end_of_sequence_id_counts_more_than_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 8]}
    assert checkpoint_of(tmp_path, {}, generation_config=generation).eos_token_ids == [7, 8]
    assert checkpoint_of(tmp_path, {"eos_token_id": 9}, generation_config=generation).eos_token_ids == [9]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a number as in config.json, not '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
        ({"architectures": "Llama"}, "architectures must be a list"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type must be a string"),
        ({"rope_scaling": 2.0}, "rope_scaling must be an object, not 2.0"),
        (
            {"max_position_embeddings": 0},
            "max_position_embeddings must be a whole number from 1 to 2147483647, not 0",
        ),
        ({"max_position_embeddings": 8192.5}, "max_position_embeddings must be a whole number"),
        (
            {"max_position_embeddings": 2**70},
            "max_position_embeddings must be a whole number from 1 to 21474",
        ),
        ({"hidden_size": "64"}, 'hidden_size must be a whole number from 1 to 2147483647, not "64"'),
        (
            {"num_hidden_layers": None},
            "num_hidden_layers must be a whole number from 1 to 2147483647, not null",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
        ({"head_dim": 2.0}, "head_dim must be a whole number"),
        ({"attention_bias": "yes"}, 'attention_bias must be true or false, not "yes"'),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number above 0, not true"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number above 0, not null"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0, not 0"),
        ({"rope_parameters": {"factor": [2]}}, r"factor must be a number above 0, not \[2\]"),
        ({"eos_token_id": "</s>"}, 'eos_token_id must be a token id or a list of ids, not "</s>"'),
        ({"eos_token_id": [1, "x"]}, r'eos_token_id must be a token id or a list of ids, not \[1, "x"\]'),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": [1]}, "names no architecture"),
        ({"model_type": "mamba"}, "LlamaForCausalLM is supported as model type llama, not mamba"),
    ],
)
def test_overrides_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        checkpoint_of(tmp_path, overrides, CONFIG | {"rope_parameters": PLAIN})
    assert "\n" not in str(caught.value)


def test_settings_that_the_file_does_not_have_are_named(tmp_path: Path) -> None:
    overrides = {
        "max_position_embedings": 1,
        "zzz": 1,
        "rope_theta": 1.0,
        "dtype": "float32",
        "vocab_size": 9,
    }
    assert checkpoint_of(tmp_path, overrides).warnings == [
        "--hf-overrides adds max_position_embedings, which config.json does not have: "
        "did you mean max_position_embeddings?",
        "--hf-overrides adds zzz, which config.json does not have",
    ]


def test_a_missing_model_type_can_be_given(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "model_type"}
    with pytest.raises(ValueError, match='add --hf-overrides \'{"model_type": "llama"}\''):
        checkpoint_of(tmp_path, None, config)
    assert checkpoint_of(tmp_path, {"model_type": "llama"}, config).model_type == "llama"


def test_new_names_win_where_a_file_has_both() -> None:
    config = {"torch_dtype": "float16", "dtype": "float32", "rope_theta": 1.0, "rope_parameters": PLAIN}
    assert with_new_names(config) == {"dtype": "float32", "rope_parameters": PLAIN}


def test_the_text_settings_of_a_multimodal_config_are_at_the_top(tmp_path: Path) -> None:
    """Those stated at the top have precedence, unless they are null; overrides may have either form."""
    text = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")}
    given = {
        "architectures": CONFIG["architectures"], "model_type": "llama", "tie_word_embeddings": False,
        "eos_token_id": None, "vision_config": {"hidden_size": 5},
        "text_config": {**text, "model_type": "llama_text", "rope_theta": 5e5},
    }  # fmt: skip
    overrides = {"text_config": {"num_hidden_layers": 2}, "max_position_embeddings": 512}
    checkpoint = checkpoint_of(tmp_path, overrides, given)
    assert checkpoint.model_type == "llama" and checkpoint.max_model_len == 512
    (warning,) = checkpoint.warnings
    assert "images are refused" in warning and checkpoint.dtype == "bfloat16"
    assert checkpoint.eos_token_ids == [2]
    wanted = {
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "rope_parameters": PLAIN,
    }
    assert wanted.items() <= checkpoint.hf_config.items()
