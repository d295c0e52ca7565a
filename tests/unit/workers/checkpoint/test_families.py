"""What runs, and what is refused by name without torch."""

import importlib
import pkgutil

import pytest

import workers.models
from tests.helpers.checkpoints.tiny_models import TINY_MODELS
from workers.checkpoint.families import (
    architectures,
    check_supported,
    families,
    has_aux_hidden_states,
    keeps_states,
    mtp_layers,
)
from workers.layers.decoder.decoder_lm import DecoderLM


def tables() -> dict[str, dict[str, type]]:
    """ARCHITECTURES of every model file that has it."""
    found = {}
    for module in pkgutil.iter_modules(workers.models.__path__):
        table = getattr(importlib.import_module(f"workers.models.{module.name}"), "ARCHITECTURES", None)
        if table is not None:
            found[module.name] = table
    return found


def test_what_runs_is_what_the_model_files_declare() -> None:
    """It is read from their text: importing them takes torch."""
    declared = {family: list(table) for family, table in tables().items()}
    assert {family: list(names) for family, names in architectures().items()} == declared


def test_families_that_keep_states_say_so() -> None:
    of_files = {
        family: getattr(importlib.import_module(f"workers.models.{family}"), "KEEPS_STATES", False)
        for family in families()
    }
    assert {family: keeps_states(family) for family in families()} == of_files
    assert of_files["qwen3_next"] is True and of_files["qwen3"] is False


def test_families_that_hand_out_no_hidden_states_say_so() -> None:
    for family, table in tables().items():
        kinds = {issubclass(kind, DecoderLM) for kind in table.values()}
        assert kinds == {has_aux_hidden_states(family)}, family
    assert has_aux_hidden_states("qwen3") and not has_aux_hidden_states("deepseek_v4")


def test_families_that_predict_several_tokens_say_which_field_counts_the_layers() -> None:
    config = {"num_nextn_predict_layers": 1}
    assert [family for family in families() if mtp_layers(family, config)] == [
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "qwen3_next",
    ]
    config = {"mtp_num_hidden_layers": 1}
    assert [family for family in families() if mtp_layers(family, config)] == [
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
    ]
    assert mtp_layers("deepseek_v3", {}) == mtp_layers("glm4_moe", {"num_nextn_predict_layers": None}) == 0


def test_every_family_has_tiny_models_that_prove_it() -> None:
    """Its own, or those of the family whose classes it takes, perhaps with other names in the checkpoint."""
    proven = {model.model_type for model in TINY_MODELS}
    assert proven <= set(families())
    classes = tuple({kind for family in proven for kind in tables()[family].values()})
    for family in set(families()) - proven:
        assert all(issubclass(kind, classes) for kind in tables()[family].values()), family


def test_what_runs_is_accepted() -> None:
    for family, names in architectures().items():
        for name in names:
            check_supported(name, family)
            check_supported(name, family, own_code=True)


@pytest.mark.parametrize(
    ("architecture", "model_type", "own_code", "words"),
    [
        (
            "MambaForCausalLM",
            "mamba",
            False,
            "MambaForCausalLM is not supported; supported are: .*Qwen3ForCausal",
        ),
        ("OwnModel", None, True, r"own code \(auto_map\) is never run; supported are: .*LlamaForCausalLM"),
        ("LlamaForCausalLM", None, False, 'as model type llama, not None; .*{"model_type": "llama"}'),
        ("LlamaForCausalLM", "qwen3", False, "is supported as model type llama, not qwen3"),
        ("LlamaForSequenceClassification", "llama", False, "is not supported"),
    ],
)
def test_what_does_not_run_is_refused_with_what_does(
    architecture: str, model_type: str | None, own_code: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_supported(architecture, model_type, own_code)


def test_what_runs_is_listed_once() -> None:
    with pytest.raises(ValueError, match="supported are: ") as raised:
        check_supported("MambaForCausalLM", "mamba")
    listed = str(raised.value).partition("supported are: ")[2].split(", ")
    assert listed == sorted(set(listed)) and "LlamaForCausalLM" in listed
