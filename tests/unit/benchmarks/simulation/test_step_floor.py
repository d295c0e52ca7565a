"""Bytes, operations and floors of a decode step, against figures counted by hand from the configurations."""

import json
from typing import Any

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.kernel_runs.kernel_shapes import config_file
from benchmarks.simulation.decoder import decoder
from benchmarks.simulation.step_floor import StepFloor, StepShape, step_floor, weight_formats


def floor(model: str, rows: int, context: int, **more: Any) -> StepFloor:
    return step_floor(model, StepShape(rows, context, **more))


@pytest.mark.parametrize(
    ("model", "weights_gb", "total_gb"),
    [("Qwen3-0.6B", 1.192, 1.22), ("Qwen3-8B", 15.136, 15.17), ("Qwen3-30B-A3B", 6.083, 6.11)],
)
def test_bytes_of_one_row(model: str, weights_gb: float, total_gb: float) -> None:
    moved = floor(model, 1, 256).moved
    assert moved.weights / 1e9 == pytest.approx(weights_gb, abs=5e-4)
    assert moved.total / 1e9 == pytest.approx(total_gb, abs=5e-3)


def test_bytes_by_kind() -> None:
    moved = floor("Qwen3-8B", 64, 99).moved
    assert moved.attention == 2 * 36 * (4096 * 6144 + 4096 * 4096)
    assert moved.dense == 2 * 36 * 3 * 4096 * 12288
    assert moved.head == 2 * 4096 * 151936
    assert moved.cache == 64 * (99 + 1) * 36 * 2 * 8 * 128 * 2, "99 are read, and one is written"
    assert moved.experts == moved.drafts == 0


def test_experts_are_those_that_an_even_router_chooses() -> None:
    model = decoder("Qwen3-30B-A3B")
    assert model.touched(1) == pytest.approx(8) and model.touched(64) == pytest.approx(126, abs=0.1)
    assert floor("Qwen3-30B-A3B", 1, 1).moved.experts == pytest.approx(2 * 48 * 8 * 3 * 2048 * 768)
    assert floor("Qwen3-30B-A3B", 64, 1).moved.experts == pytest.approx(
        2 * 48 * 125.94 * 3 * 2048 * 768, rel=1e-4
    )


@pytest.mark.parametrize(
    ("rows", "context", "bound", "milliseconds"),
    [(1, 256, "bytes", 3.39), (64, 97, "bytes", 3.59), (256, 97, "FLOPs", 5.11)],
)
def test_floors_are_the_recorded_ones(rows: int, context: int, bound: str, milliseconds: float) -> None:
    found = floor("Qwen3-8B", rows, context)
    assert found.bound == bound and found.seconds * 1e3 == pytest.approx(milliseconds, abs=5e-3)


def test_quantized_weights_have_their_scales_and_routers_and_heads_are_plain() -> None:
    plain, fp8, int4 = (floor(f"Qwen3-8B{name}", 1, 256).moved for name in ("", "-FP8", "-INT4"))
    assert fp8.dense == pytest.approx(plain.dense / 2 * (1 + 4 / 128**2))
    assert int4.attention == pytest.approx(plain.attention / 2 * (0.5 + 2 / 128))
    assert plain.head == fp8.head == int4.head
    mxfp4, bfloat16 = (floor(name, 1, 1).moved for name in ("gpt-oss-20b-MXFP4", "gpt-oss-20b"))
    assert mxfp4.experts == pytest.approx(bfloat16.experts / 2 * (0.5 + 1 / 32))
    assert (mxfp4.attention, mxfp4.dense) == (bfloat16.attention, bfloat16.dense)


def test_fp8_is_multiplied_twice_as_fast() -> None:
    plain, fp8 = (floor(f"Qwen3-8B{name}", 256, 97) for name in ("", "-FP8"))
    assert plain.operations == fp8.operations
    assert plain.multiply_s / 2 < fp8.multiply_s < 0.55 * plain.multiply_s


def test_a_window_ends_what_half_of_the_layers_see() -> None:
    short, long = (floor("gpt-oss-20b", 1, context).moved.cache for context in (127, 1023))
    each = 24 * 2 * 8 * 64 * 2
    assert short == 128 * each and long == ((1023 + 128) / 2 + 1) * each


def test_a_float8_cache_has_a_scale_for_each_head() -> None:
    assert floor("Qwen3-8B", 1, 9, float8_cache=True).moved.cache == 10 * 36 * 2 * 8 * (128 + 4)
    with pytest.raises(BenchmarkError, match="DeepSeek-V2-Lite: bytes of latents in a float8 cache"):
        floor("DeepSeek-V2-Lite", 1, 9, float8_cache=True)


def test_ranks_share_everything() -> None:
    one, two = (floor("Qwen3-8B", 64, 97, tp=tp) for tp in (1, 2))
    assert two.moved.total == pytest.approx(one.moved.total / 2)
    assert two.operations == pytest.approx(one.operations / 2)


def test_drafts_multiply_more_and_read_the_same() -> None:
    plain, drafted = (floor("Qwen3-8B", 1, 512, tokens=tokens) for tokens in (1, 4))
    assert drafted.moved.weights == plain.moved.weights and drafted.operations == 4 * plain.operations
    head = floor("Qwen3-8B", 1, 512, tokens=4, draft_head="Qwen3-8B-EAGLE3")
    layer = 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 12288
    assert head.moved.drafts == 2 * (3 * 4096 * 4096 + 3 * (layer + 4096 * 32000))
    more = 2 * (4 * 3 * 4096 * 4096 + 6 * layer + 3 * 4096 * 32000)
    assert head.operations - drafted.operations == more


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "awq"}, "M: bytes of a weight in awq are not known here: add the format"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["q_proj"]},
            "M: q_proj are not quantized: add their sizes here",
        ),
    ],
)
def test_unknown_formats_are_errors(stated: dict[str, Any], message: str) -> None:
    config = json.loads(config_file("Qwen3-8B").read_text(encoding="utf-8"))
    with pytest.raises(BenchmarkError, match=message):
        weight_formats("M", config | {"quantization_config": stated})
