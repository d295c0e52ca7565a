"""vLLM's configuration as ATOM's, without vLLM: what ATOM's models do not honour is refused by name."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODULE = "atom.plugin.vllm.host_config"


@pytest.fixture
def host_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a stand-in for the one that it imports from vLLM."""
    groups = ModuleType("vllm.distributed.parallel_state")
    vars(groups)["get_tp_group"] = lambda: SimpleNamespace(rank_in_group=0, world_size=1, device_group=None)
    host = ModuleType("vllm")
    vars(host)["envs"] = SimpleNamespace(VLLM_USE_BREAKABLE_CUDAGRAPH=False)
    for name, module in (("vllm", host), ("vllm.distributed.parallel_state", groups)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    loaded = import_module(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, loaded)
    return loaded


def vllm_config(**changes: Any) -> Any:
    """vLLM's defaults as far as they are read, with changes as part__field."""
    parts: dict[str, Any] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "enable_dbo": False,
        },
        "model_config": {
            "model": "/nowhere",
            "dtype": torch.bfloat16,
            "max_model_len": 32,
            "enable_prompt_embeds": False,
            "runner_type": "generate",
        },
        "cache_config": {"block_size": 16},
    }
    whole: dict[str, Any] = {"lora_config": None, "speculative_config": None, "additional_config": {}}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            whole[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()}, **whole)


def test_the_defaults_are_supported(host_config: Any) -> None:
    host_config.check_supported(vllm_config())
    ngram = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    host_config.check_supported(vllm_config(speculative_config=ngram))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        (
            {"parallel_config__data_parallel_size": 2, "parallel_config__enable_expert_parallel": True},
            "--enable-expert-parallel with --data-parallel-size",
        ),
        ({"parallel_config__enable_eplb": True}, "--enable-eplb"),
        ({"parallel_config__enable_dbo": True}, "--enable-dbo"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"model_config__enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "method eagle3"),
        ({"model_config__runner_type": "pooling"}, "--runner pooling"),
    ],
)
def test_a_setting_without_effect_is_refused_by_its_name(
    host_config: Any, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        host_config.check_supported(vllm_config(**changes))
    assert "ATOM_DISABLE_VLLM_PLUGIN=1" in str(refused.value) and "\n" not in str(refused.value)


def test_graphs_that_would_contain_attention_of_prompts_are_refused(host_config: Any) -> None:
    def config(piecewise: bool) -> Any:
        mode = SimpleNamespace(has_piecewise_cudagraphs=lambda: piecewise)
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))

    host_config.check_graphs(config(piecewise=True))
    host_config.host_envs.VLLM_USE_BREAKABLE_CUDAGRAPH = True
    host_config.check_graphs(config(piecewise=False))
    with pytest.raises(ValueError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=1.*set it to 0"):
        host_config.check_graphs(config(piecewise=True))


def test_additional_config_is_online_quantization_alone(host_config: Any) -> None:
    assert host_config.online_quantization_of(vllm_config()) is None
    given = {"online_quant_config": {"global_quant_config": "ptpc_fp8"}}
    assert host_config.online_quantization_of(vllm_config(additional_config=given)) is not None
    with pytest.raises(ValueError, match="not other"):
        host_config.online_quantization_of(vllm_config(additional_config={"other": 1}))


def test_layers_are_built_for_drafts_after_the_longest_sequence(host_config: Any) -> None:
    ngram = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    build = host_config.build_context(vllm_config(speculative_config=ngram), torch.device("cpu"))
    assert (build.max_positions, build.block_size, build.separate_tables) == (35, 16, True)
    assert build.tp.size == 1 and build.dtype == torch.bfloat16


def test_the_checkpoint_has_old_settings_under_their_new_names(host_config: Any) -> None:
    settings = {
        "model_type": "llama", "vocab_size": 10, "max_position_embeddings": 64, "rope_theta": 5e5,
        "torch_dtype": "bfloat16", "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    model = SimpleNamespace(
        model="/nowhere",
        dtype=torch.float16,
        architectures=["LlamaForCausalLM"],
        hf_config=SimpleNamespace(to_dict=lambda: settings),
    )
    checkpoint = host_config.checkpoint_of(model)
    assert (checkpoint.architecture, checkpoint.model_type) == ("LlamaForCausalLM", "llama")
    assert (checkpoint.dtype, checkpoint.max_model_len) == ("float16", 128)
    assert checkpoint.hf_config["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
    }
