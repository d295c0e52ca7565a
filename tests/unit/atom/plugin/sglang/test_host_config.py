"""SGLang's configuration as ATOM's, without SGLang: what ATOM's models do not honour is refused by name."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.helpers.plugins.sglang_host import PLUGIN, Host, install


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    install(monkeypatch, found)
    return found


def config() -> Any:
    return import_module(f"{PLUGIN}.host_config")


def test_the_defaults_are_supported(host: Host) -> None:
    config().check_supported(host.args, "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"ep_size": 2, "tp_size": 4}, "--ep-size other than 1 and --tp-size"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ],
)
def test_a_setting_without_effect_is_refused_by_its_name(
    host: Host, changes: dict[str, Any], named: str
) -> None:
    vars(host.args).update(changes)
    with pytest.raises(ValueError, match=named) as refused:
        config().check_supported(host.args, "")
    assert "ATOM_DISABLE_SGLANG_PLUGIN=1" in str(refused.value) and "\n" not in str(refused.value)


def test_a_part_of_a_larger_model_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match="within another one \\(language_model\\)"):
        config().check_supported(host.args, "language_model")


@pytest.mark.parametrize(("name", "own"), [("atom", True), ("aiter", True), ("triton", False), (None, False)])
def test_the_server_says_whose_attention_it_is(host: Host, name: str | None, own: bool) -> None:
    host.args.attention_backend = name
    assert config().uses_own_attention() is own


def test_disabled_attention_is_the_host_s_under_every_name(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION", "1")
    host.args.attention_backend = "aiter"
    assert not config().uses_own_attention()


def test_half_of_the_attention_is_refused(host: Host) -> None:
    host.args.decode_attention_backend = "triton"
    with pytest.raises(ValueError, match="--prefill-attention-backend"):
        config().uses_own_attention()


def test_padding_of_sglang_on_a_cpu_is_taken_back(host: Host) -> None:
    settings = {
        "num_attention_heads": 4, "original_num_attention_heads": 4, "intermediate_size": 128,
        "original_intermediate_size": 100, "original_max_position_embeddings": 7,
    }  # fmt: skip
    assert config().without_padding(settings) == {
        "num_attention_heads": 4, "intermediate_size": 100, "original_max_position_embeddings": 7,
    }  # fmt: skip


def test_padded_heads_are_refused(host: Host) -> None:
    with pytest.raises(ValueError, match="--tp-size: SGLang pads the 9 heads"):
        config().without_padding({"num_attention_heads": 12, "original_num_attention_heads": 9})


def test_layers_are_built_for_the_server_s_context_and_pages(host: Host) -> None:
    settings = {
        "model_type": "llama", "vocab_size": 10, "max_position_embeddings": 64, "rope_theta": 5e5,
        "torch_dtype": "float32", "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    loaded = config()
    checkpoint = loaded.checkpoint_of(_Config(settings), "LlamaForCausalLM")
    assert (checkpoint.architecture, checkpoint.dtype) == ("LlamaForCausalLM", "float32")
    context = loaded.build_context(checkpoint, torch.device("cpu"))
    assert (context.max_positions, context.block_size, context.dtype) == (64, 4, torch.float32)
    assert loaded.query_heads(checkpoint, context) == 4
    host.args.context_length = 32
    assert loaded.build_context(checkpoint, torch.device("cpu")).max_positions == 32


class _Config:
    def __init__(self, settings: dict[str, Any]):
        self._settings = settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self._settings)
