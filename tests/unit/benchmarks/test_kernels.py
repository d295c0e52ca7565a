"""Shapes, counted work and clock of the kernel benchmark, on tiny models."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.benchmarks.serving.errors import BenchmarkError
from atom_ops import backend
from atom_ops.op import REGISTRY
from atom_ops.weights.samples import Format
from benchmarks import kernels
from benchmarks.kernel_runs import kernel_clock
from benchmarks.kernel_runs.kernel_clock import Clock, Roofline, Timing
from benchmarks.kernel_runs.kernel_shapes import (
    MODELS,
    STEPS,
    LatentShape,
    ModelShape,
    StepShape,
    model_shape,
)
from benchmarks.kernel_runs.kernel_work import Inputs, bytes_of, works

CPU = torch.device("cpu")
DENSE = ModelShape(64, 4, 2, 16, 96, 160, head_norms=True)
LATENT = dataclasses.replace(DENSE, latent=LatentShape(40, 32, 12, 8, 20))
MIXED = dataclasses.replace(DENSE, experts=8, chosen=2, expert_features=24)
STEP_SHAPES = [StepShape("decode", 3, 1, 40), StepShape("prefill", 2, 33, 48)]


@pytest.mark.parametrize("model", [DENSE, MIXED, LATENT], ids=["dense", "mixed", "latent"])
@pytest.mark.parametrize("step", STEP_SHAPES, ids=lambda step: step.name)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_op_runs_on_what_is_made_for_it(name: str, model: ModelShape, step: StepShape) -> None:
    backend.resolve(CPU)
    op = REGISTRY[name]
    for work in works(op, model, step, torch.float32):
        given = work.make(Inputs(torch.float32, CPU, torch.Generator().manual_seed(0)))
        result = op(*given)
        assert work.label
        if work.flops is not None and work.moved is not None:
            # What must move is part of what there is, and more than the results alone.
            assert bytes_of(result) < work.moved <= bytes_of(given) * 2 + bytes_of(result)


@pytest.mark.parametrize("weights", ["block_fp8", "channel_int8", "int4_128", "mxfp4"])
@pytest.mark.parametrize("name", ["linear", "add_norm_linear", "silu_and_mul_linear"])
def test_linear_layers_may_be_quantized(name: str, weights: Format) -> None:
    backend.resolve(CPU)
    model = dataclasses.replace(DENSE, hidden=256, heads=8, features=128)
    inputs = Inputs(torch.float32, CPU, torch.Generator().manual_seed(0), weights)
    found = [work.make(inputs) for work in works(REGISTRY[name], model, STEP_SHAPES[0], torch.float32)]
    shapes = [tuple(part.shape) for given in found for part in given if isinstance(part, torch.Tensor)]
    assert shapes.count((160, 256)) == (name == "linear")  # the LM head is plain
    for given in found:
        REGISTRY[name](*given)


def work_of(name: str, model: ModelShape, step: StepShape, label: str) -> Any:
    (found,) = [work for work in works(REGISTRY[name], model, step, torch.float32) if label in work.label]
    return found


def test_operations_and_bytes_are_those_of_paper() -> None:
    decode, prefill = STEP_SHAPES
    assert work_of("linear", DENSE, decode, "gate_up").flops == 2 * 3 * 64 * 192
    assert work_of("linear", DENSE, prefill, "lm_head").flops == 2 * 2 * 64 * 160
    # Queries 15 … 47 see 16 … 48 tokens; scores and sums take two operations each for a number.
    assert work_of("paged_attention", DENSE, prefill, "").flops == 4 * 2 * sum(range(16, 49)) * 64
    read = 3 * 40 * 2 * 2 * 16 * 4
    assert work_of("paged_attention", DENSE, decode, "").moved == read + 2 * 3 * 64 * 4
    assert work_of("embedding", DENSE, decode, "").moved == 3 * (2 * 64 * 4 + 8)
    assert work_of("experts", MIXED, decode, "").flops == 6 * 3 * 2 * 64 * 24
    # A row of the cache is read once for all heads, and serves as key and as value.
    decode_moved = work_of("latent_attention", LATENT, decode, "4 heads").moved
    assert decode_moved == 4 * (3 * 40 * 40 + 3 * 4 * (40 + 32))
    assert work_of("latent_attention", LATENT, decode, "4 heads").flops == 2 * 3 * 40 * 4 * (40 + 32)
    one = work_of("experts", MIXED, StepShape("one", 1, 1, 8), "")
    assert one.moved == pytest.approx(4 * (3 * 2 * 64 * 24 + 2 * 64) + 12 * 2)


def test_slots_are_those_of_the_block_table() -> None:
    step = STEP_SHAPES[1]
    table, slots = step.block_table(), step.slots().reshape(2, 33)
    assert sorted(table.ravel()) == list(range(6))
    assert slots[1, 0] == table[1, 0] * 16 + 15 and slots[1, 32] == table[1, 2] * 16 + 15


def test_sizes_come_from_configurations(tmp_path: Path) -> None:
    assert {model_shape(name).hidden for name in MODELS} == {1024, 2048, 2880, 4096, 7168}
    assert model_shape("Qwen3-0.6B").head_norms and not model_shape("Llama-3.1-8B").head_norms
    with pytest.raises(BenchmarkError, match="no directory with config.json; shipped are"):
        model_shape("Qwen3-0.7B")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(BenchmarkError, match="does not give a decoder's sizes: KeyError"):
        model_shape(str(tmp_path))
    config = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 160}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    assert ModelShape.from_config(config) == dataclasses.replace(MIXED, kv_heads=4, head_norms=False)


def test_the_floor_is_the_longer_of_both() -> None:
    roofline = Roofline(bytes_per_s=100.0, flops_per_s=1000.0)
    assert (roofline.floor(200, 500), roofline.bound(200, 500)) == (2.0, "memory")
    assert (roofline.floor(200, 5000), roofline.bound(200, 5000)) == (5.0, "compute")


def test_the_clock_shares_its_time_among_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = 0.0, []

    def call(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        ran.append(name)

    monkeypatch.setattr(kernel_clock.time, "perf_counter", lambda: now)
    timing = Clock(CPU, 10.0).time([lambda: call("a", 1.0), lambda: call("b", 3.0)])
    assert timing == Timing(2.0, 1.0, "call")
    assert ran == ["a", "b"] * 4  # one round untimed, three of 4 s


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(kernels, "measure_roofline", lambda *_: Roofline(1e10, 1e12))
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", *flags])
    kernels.main()


def test_the_command_writes_a_row_for_each_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 160}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "kernels.json"
    flags = ["--model", str(tmp_path), "--shapes", "decode-1", "--seconds", "0", "--output-json", str(file)]
    run(monkeypatch, *flags, "--ops", "linear", "masked_attention")
    result = json.loads(file.read_text())
    assert result["benchmark"] == "kernels" and result["copy_bytes_per_s"] == 1e10
    assert f"--model {tmp_path.name} " in result["command"] and str(tmp_path) not in result["command"]
    rows = {(row["op"], row["provider"], row["shape"]): row for row in result["rows"]}
    providers = {provider for op, provider, _ in rows if op == "linear"}
    supported = {name for name, one in REGISTRY["linear"].providers.items() if one.supported(CPU)}
    assert {"torch", "onednn_packed"} <= providers <= supported  # others read quantized weights alone
    row = rows["linear", "torch", "qkv 1x64x192"]
    assert row["bytes"] == 4 * (64 + 64 * 192 + 192) and row["flops"] == 2 * 64 * 192
    assert row["of_roofline"] == pytest.approx(row["bytes"] / 1e10 / row["microseconds"] * 1e6)
    assert "bytes" not in rows["masked_attention", "torch", "own case 4/4x1"]
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "decode-3"], "error: --shapes: invalid choice: 'decode-3'"),
        (["--ops", "gemm"], "error: --ops: invalid choice: 'gemm'"),
        (["--seconds", "-1"], "error: --seconds: -1 is not between 0 and 60"),
        (["--model", "nowhere"], "error: --model nowhere: no directory with config.json"),
        (["--output-json", "."], "error: --output-json: . is a directory: name a file"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *flags)
    said = capsys.readouterr().err or f"{ended.value.code}\n"
    assert said.startswith(message) and said.count("\n") == 1


def test_steps_have_their_names() -> None:
    assert all(name == step.name and step.new <= step.context for name, step in STEPS.items())
