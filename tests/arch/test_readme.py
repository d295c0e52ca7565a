"""What the README promises is what the code has."""

from dataclasses import fields

import atom
from atom.config.engine import EngineConfig
from atom.config.fields import fields_of
from atom.config.not_yet import REFUSED
from tools.readme_tables import README, with_tables

DOCUMENTED_FLAGS = [
    "model",
    "trust_remote_code",
    "tensor_parallel_size",
    "data_parallel_size",
    "enforce_eager",
    "enable_prefix_caching",
    "port",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "scheduler_delay_factor",
    "cudagraph_capture_sizes",
    "level",
    "load_dummy",
    "enable_expert_parallel",
    "enable_dp_attention",
    "torch_profiler_dir",
    "mark_trace",
    "method",
    "num_speculative_tokens",
]


def test_tables_are_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `make readme`"


def test_every_flag_that_users_of_atom_know_is_known() -> None:
    served = {field.name for concern in fields(EngineConfig) for field in fields_of(concern.default_factory)}
    assert not served & REFUSED.keys()
    assert set(DOCUMENTED_FLAGS) <= served | REFUSED.keys()


def test_public_names() -> None:
    assert atom.__all__ == ["EngineArgs", "LLMEngine", "RequestOutput", "SamplingParams"]
    for name in atom.__all__:
        assert getattr(atom, name).__name__ == name
