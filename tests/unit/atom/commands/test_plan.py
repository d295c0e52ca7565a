"""What --plan says of planned ranks: capacities, suggestion, text."""

from dataclasses import replace

import msgspec
import pytest

from atom.commands import plan as planning
from atom.commands.plan_report import plan_text
from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.model import ModelConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.resolve import DeviceCapabilities
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.messages.plan import LayoutPlan, PlanResult, RankPlan
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from atom.shared.utils.sizes import size_text

GIB = 1 << 30
BLOCK = 16
CONTEXT = 4096
FULL = FullAttentionSpec(BLOCK, BLOCK * 1024)
CHECKPOINT = Checkpoint("/nowhere", "LlamaForCausalLM", "llama", {}, "bfloat16", 1000, CONTEXT)
CONFIG = EngineConfig(
    model=ModelConfig(model="some/model", dtype="bfloat16"),
    cache=CacheConfig(),
    scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
    device=DeviceConfig(device="cuda", cudagraph_capture_sizes="[]"),
)


def layout(
    size: int, kv_bytes: int, specs: list[KVSpec] | None = None, left: int | None = None
) -> LayoutPlan:
    weights = 10 * GIB // size
    left_bytes = kv_bytes if left is None else left
    ranks = [RankPlan(0, weights, {"plain": weights}, specs or [FULL], kv_bytes, left_bytes)]
    return LayoutPlan(size, ranks)


def made(layouts: list[LayoutPlan], config: EngineConfig = CONFIG, assumed: bool = True) -> planning.Plan:
    result = PlanResult(layouts=layouts, device_bytes=16 * GIB, logits_bytes=1 << 20)
    return planning._plan(config, CHECKPOINT, DeviceCapabilities(cuda=4), result, ["a note"], assumed)


def test_capacity_is_by_the_rules_of_the_core() -> None:
    plan = made([layout(1, 8 << 20)])
    assert plan.layout.kv_tokens == 8192 and plan.layout.max_model_len == CONTEXT
    assert plan.layout.requests == {1024: 8, CONTEXT: 2}
    assert plan.suggestion == 1


def test_the_smallest_layout_with_the_whole_context_is_suggested() -> None:
    plan = made([layout(1, 0, left=-GIB), layout(2, 1 << 20), layout(4, 8 << 20)])
    assert plan.layout.problem == "the weights take 10.0 GiB on a rank, which may use 9.0 GiB"
    assert [each.max_model_len for each in plan.layouts] == [1024, CONTEXT]
    assert plan.suggestion == 4
    assert made([layout(1, 0, left=-GIB), layout(2, 1 << 20)]).suggestion == 2
    none = made([layout(1, 0, left=-GIB)])
    assert none.suggestion is None and "more GPUs, or larger ones: the weights alone fill 2" in plan_text(
        none
    )


def test_a_configured_cache_must_fit_next_to_the_weights() -> None:
    assert "the KV cache takes" in made([layout(1, 8 << 20, left=1 << 20)]).layout.problem
    long = replace(CONFIG, model=replace(CONFIG.model, max_model_len=2048))
    assert "max_model_len 2048 does not fit" in made([layout(1, 1 << 20)], long).layout.problem


def test_windows_and_states_bound_the_requests() -> None:
    window = SlidingWindowSpec(BLOCK, BLOCK * 1024, 64)
    states = RecurrentStateSpec(1 << 20)
    plan = made([layout(1, 64 << 20, [window, FULL])])
    assert plan.layout.requests == {1024: 57, CONTEXT: 14}
    plan = made([layout(1, 16 << 20, [FULL, states])])
    assert plan.layout.requests == {1024: 8, CONTEXT: 2}
    text = plan_text(plan)
    assert "1.0 MiB a request on a rank (recurrent states)" in text


def test_text_is_one_screen_and_json_has_the_same_figures() -> None:
    plan = made([layout(1, 8 << 20), layout(2, 16 << 20), LayoutPlan(4, [], "it cannot be split")])
    lines = plan_text(plan).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 120
    assert lines[0].endswith("plan for some/model, no weights loaded")
    for text in (
        "4 assumed GPUs of 16.0 GiB",
        "10.0 GiB (plain 10.0 GiB)",
        "1.0 KiB a token on a rank (blocks of 16)",
        "at most 8,192 tokens",
        "4,096 of 4,096 tokens",
        "8 of 1,024 tokens, 2 of 4,096 tokens",
        "at least 1.0 MiB (logits); measured at start",
        "-tp 4     does not fit: it cannot be split",
        "use       -tp 1",
        "note      a note",
    ):
        assert any(text in line for line in lines), text
    decoded = msgspec.json.decode(msgspec.json.encode(plan), type=planning.Plan)
    assert decoded == plan


def test_engines_that_share_experts_are_shown() -> None:
    parallel = ParallelConfig(data_parallel_size=4, enable_expert_parallel=True, enable_dp_attention=True)
    lines = plan_text(made([layout(1, 8 << 20)], replace(CONFIG, parallel=parallel))).splitlines()
    assert "  layout    4 engines of 1 x cuda, experts spread over 4 workers" in lines
    assert "  use       -dp 4 --enable-dp-attention" in lines


def test_ranks_that_split_the_kv_cache_are_named() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    shared = FullAttentionSpec(2 * BLOCK, BLOCK * 1024)
    plan = made([layout(4, 8 << 20, [shared])], replace(CONFIG, parallel=parallel))
    assert plan.layout.kv_tokens == 16384
    text = plan_text(plan)
    assert "4 x cuda (each 2 split the KV cache by tokens)" in text
    assert "512 bytes a token on a rank (blocks of 32)" in text


def test_sizes_to_try() -> None:
    gpus = DeviceCapabilities(cuda=6)
    twice = replace(CONFIG, parallel=ParallelConfig(tensor_parallel_size=3, data_parallel_size=2))
    heads = replace(CHECKPOINT, hf_config={"num_attention_heads": 3})
    assert planning._sizes(CONFIG, CHECKPOINT, gpus) == [1, 2, 4]
    assert planning._sizes(twice, CHECKPOINT, gpus) == [1, 2, 3]
    assert planning._sizes(CONFIG, heads, gpus) == [1, 2]
    attention = replace(CONFIG, parallel=ParallelConfig(data_parallel_size=4, enable_dp_attention=True))
    assert planning._sizes(attention, CHECKPOINT, gpus) == [1]
    cpu = replace(CONFIG, device=DeviceConfig(device="cpu"))
    assert planning._sizes(cpu, CHECKPOINT, gpus) == [1]


@pytest.mark.parametrize("gpus", ["8", "8x", "0x80", "8x80GB", "x80", "-1x80"])
def test_bad_gpus_are_refused(gpus: str) -> None:
    with pytest.raises(ConfigError, match="--plan"):
        planning._assumed(gpus, CONFIG)


def test_assumed_gpus() -> None:
    auto = replace(CONFIG, device=DeviceConfig())
    assert planning._assumed("", auto) == (0, None)
    assert planning._assumed("8x79.5", auto) == (8, int(79.5 * GIB))
    with pytest.raises(ConfigError, match="omit --device cpu"):
        planning._assumed("8x80", replace(CONFIG, device=DeviceConfig(device="cpu")))


def test_sizes_in_text() -> None:
    assert [size_text(n) for n in (5, 2048, 3 << 20, 1536 << 30)] == [
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "1,536.0 GiB",
    ]
