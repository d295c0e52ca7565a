"""The caches of a model with sparse attention in vLLM, without vLLM: index keys are layers of their own."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from atom_ops import LatentLayer
from workers.layers.attention.cache_groups import LatentGroup

PACKAGE = "atom.plugin.vllm"
MODULES = [f"{PACKAGE}.{name}" for name in ("kv_layout", "own_attention", "host_config", "step_context")]
SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
BLOCKS, BLOCK_SIZE = 3, 4
GROUP = LatentGroup(range(2), 8, 4, index_width=6, indexed=[0])


class Host:
    """vLLM's modules as far as the plugin imports them, and the metadata of a step."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        classes = ("AttentionCGSupport", "AttentionBackend", "AttentionImpl", "AttentionMetadata")
        backend: dict[str, Any] = {name: type(name, (), {"UNIFORM_BATCH": 2}) for name in classes}
        spec = type("Spec", (), {"__dataclass_fields__": {}})
        self.modules: dict[str, dict[str, Any]] = {
            "vllm": {"envs": SimpleNamespace()},
            "vllm.distributed.parallel_state": {"get_tp_group": None},
            "vllm.forward_context": {
                "get_forward_context": lambda: SimpleNamespace(attn_metadata=self.metadata)
            },
            "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": type("Layer", (), {})},
            "vllm.v1.attention.backend": backend | {"AttentionMetadataBuilder": type("Builder", (), {})},
            "vllm.v1.kv_cache_interface": dict.fromkeys(SPECS, spec),
        }


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    for name, members in found.modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, import_module(name))
    return found


def made(layers: dict[str, Any]) -> Any:
    """The context of a model with that group, whose caches are bound."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    context = sys.modules[f"{PACKAGE}.step_context"].OwnAttentionContext(
        SimpleNamespace(kv_groups=[GROUP]), config, torch.device("cpu")
    )
    for name, layer in layers.items():
        layer.kv_cache = torch.zeros(BLOCKS, 1, BLOCK_SIZE, 6 if "indexer" in name else 12)
    return context


def metadata(table_RW: torch.Tensor) -> Any:
    plan = SimpleNamespace(block_table_RW=table_RW, num_tokens=1)
    return SimpleNamespace(group=SimpleNamespace(plan=plan, slots_T=None), block_size=BLOCK_SIZE)


def test_index_keys_are_a_cache_of_the_layer(host: Host) -> None:
    layers: dict[str, Any] = {}
    context = made(layers)
    keys = "model.layers.0.self_attn.indexer.k_cache"
    assert sorted(layers) == [
        "model.layers.0.self_attn.attn", keys, "model.layers.1.self_attn.attn",
    ]  # fmt: skip
    assert list(context.layers) == [layers[name] for name in (*sorted({*layers} - {keys}), keys)]
    table_RW = torch.zeros(1, 2, dtype=torch.int32)
    host.metadata = dict.fromkeys(layers, metadata(table_RW)) | {keys: metadata(table_RW)}
    first, second = context.step(1).kv_layers
    assert isinstance(first, LatentLayer) and isinstance(second, LatentLayer)
    assert first.index is not None and first.index.keys.shape == (BLOCKS, BLOCK_SIZE, 6)
    assert first.index.keys.data_ptr() == layers[keys].kv_cache.data_ptr()
    assert first.rows.shape == (BLOCKS, BLOCK_SIZE, 12) and second.index is None


def test_other_slots_for_index_keys_are_refused(host: Host) -> None:
    layers: dict[str, Any] = {}
    context = made(layers)
    tables = torch.zeros(2, 1, 2, dtype=torch.int32)
    host.metadata = dict.fromkeys(layers, metadata(tables[0]))
    host.metadata["model.layers.0.self_attn.indexer.k_cache"] = metadata(tables[1])
    with pytest.raises(ValueError, match="several block tables"):
        context.step(1)


def test_memory_is_measured_with_index_keys(host: Host) -> None:
    context = made({})
    host.metadata = None  # type: ignore[assignment]
    first, _ = context.step(5).kv_layers
    assert isinstance(first, LatentLayer) and first.index is not None
