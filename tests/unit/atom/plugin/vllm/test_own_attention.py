"""ATOM's attention plans from vLLM's metadata of a step, without vLLM: those that it captures in graphs."""

import sys
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODULE = "atom.plugin.vllm.own_attention"
MAX_LEN = 64


class Support(Enum):
    UNIFORM_BATCH = 2
    NEVER = 0


class Builder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        self.kv_cache_spec = kv_cache_spec


@dataclass(frozen=True)
class Spec:
    block_size: int


SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": type("Layer", (), {})},
    "vllm.v1.attention.backend": {
        "AttentionCGSupport": Support,
        "AttentionMetadataBuilder": Builder,
        **{name: type(name, (), {}) for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadata")},
    },
    "vllm.v1.kv_cache_interface": dict.fromkeys(
        ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"), Spec
    ),
}


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with stand-ins for those that it imports from vLLM."""
    for name, members in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in (MODULE, "atom.plugin.vllm.kv_layout"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, import_module(name))
    return sys.modules[MODULE]


def builder_of(own_attention: Any, drafts: int = 0) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    config = SimpleNamespace(
        speculative_config=speculative, model_config=SimpleNamespace(max_model_len=MAX_LEN)
    )
    return own_attention.PlanBuilder(Spec(16), ["layer"], config, torch.device("cpu"))


def step_of(rows: int, queries: int, dtype: torch.dtype = torch.int32) -> Any:
    """vLLM's metadata of a step: the first rows of buffers that it keeps."""
    starts = torch.arange(10, dtype=torch.int32) * queries
    return SimpleNamespace(
        num_reqs=rows,
        num_actual_tokens=rows * queries,
        max_query_len=queries,
        max_seq_len=7,
        query_start_loc=starts[: rows + 1],
        query_start_loc_cpu=starts[: rows + 1],
        seq_lens=torch.full((8,), 7, dtype=dtype),
        seq_lens_cpu_upper_bound=None,
        block_table_tensor=torch.zeros(8, 4, dtype=torch.int32),
        slot_mapping=torch.arange(32),
    )


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_captured_plan_reads_the_tensors_of_vllm(own_attention: Any, drafts: int) -> None:
    builder = builder_of(own_attention, drafts)
    assert builder._cudagraph_support is Support.UNIFORM_BATCH
    step = step_of(4, 1 + drafts)
    found = builder.build_for_cudagraph_capture(step).group
    plan = found.plan
    for own, theirs in (
        (plan.block_table_RW, step.block_table_tensor),
        (plan.context_lens_R, step.seq_lens),
        (plan.query_starts_R1, step.query_start_loc),
        (found.slots_T, step.slot_mapping),
    ):
        assert own.data_ptr() == theirs.data_ptr()
    assert plan.host is None
    assert (plan.min_query_len, plan.max_query_len, plan.decode_query_len) == (1 + drafts,) * 3
    assert plan.max_context_len == MAX_LEN + drafts
    assert plan.num_tokens == len(found.slots_T) == 4 * (1 + drafts)


def test_lengths_that_would_be_copied_are_refused(own_attention: Any) -> None:
    with pytest.raises(ValueError, match=r"context lengths are torch.int64.*cudagraph_mode"):
        builder_of(own_attention).build_for_cudagraph_capture(step_of(2, 1, torch.int64))


def test_a_step_that_is_not_captured_knows_its_rows(own_attention: Any) -> None:
    plan = builder_of(own_attention).build(0, step_of(3, 5)).group.plan
    assert plan.host is not None and plan.host.query_lens.tolist() == [5, 5, 5]
    assert (plan.max_query_len, plan.max_context_len) == (5, 7)
