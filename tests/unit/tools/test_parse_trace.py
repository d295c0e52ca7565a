"""Breakdowns and reports of traces whose answers are known."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from tests.helpers.kernels.hand_made_trace import HandMadeTrace
from tools import analyze_trace_summary, parse_trace

LAYER_HEADER = (
    *("cpu_module", "gpu_kernel", "duration_us", "pct%", "sum per module", "module_pct%"),
    *("avg duration_us", "avg sum per module"),
)
TOTALS_HEADER = ("gpu_kernel", "calls", "total_duration_us", "avg_duration_us", "pct%")
RUN = "m_ts_20261121_120000_000.pt.trace.json.gz"
CAPTURE = "capture_graph_m_ts_20261121_115900_000.pt.trace.json.gz"
Rows = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *args])
    module.main()


def sheets(path: str) -> dict[str, Rows]:
    book = openpyxl.load_workbook(path)
    return {page.title: list(page.iter_rows(values_only=True)) for page in book}


def eager_layer(trace: HandMadeTrace, number: int, scale: float = 1.0) -> None:
    path = f"model.layers.{number}"
    gemm, norm = ("gemm", 30.0 * scale), ("aiter::rmsnorm", 10.0 * scale)
    qkv = partial(
        trace.range, f"{path}.self_attn.qkv_proj", lambda: trace.launch(norm), lambda: trace.launch(gemm)
    )
    mlp = partial(trace.range, f"{path}.mlp", lambda: trace.launch(("silu", 60.0 * scale)))
    trace.range(path, qkv, mlp)


def eager_step(trace: HandMadeTrace, label: str, scales: list[float]) -> None:
    embed = partial(trace.range, "model.embed_tokens", lambda: trace.launch(("gather", 5.0)))
    layers = [partial(eager_layer, trace, number, scale) for number, scale in enumerate(scales)]
    sample = partial(trace.launch, ("Memcpy DtoH", 2.5), call="cudaMemcpyAsync")
    trace.range(label, partial(trace.range, "model", embed, *layers), sample)


def test_a_step_launched_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = HandMadeTrace()
    trace.launch(("not in a step", 1000.0))
    eager_step(trace, "prefill[bs=1 tok=7 ctx=[7]]", [1.0, 1.0, 3.0])
    eager_step(trace, "prefill[bs=1 tok=9 ctx=[9]]", [50.0, 50.0, 50.0])
    run(monkeypatch, parse_trace, str(trace.write(tmp_path / RUN)), "--layer", "1")
    assert sheets("prefill_breakdown.xlsx") == {
        "prefill": [
            LAYER_HEADER,
            ("self_attn.qkv_proj", "rmsnorm", 10, 10, 40, 40, 20, 80),
            (None, "gemm", 30, 30, None, None, 60, None),
            ("mlp", "silu", 60, 60, 60, 60, 120, 120),
            ("TOTAL", None, 100, 100, 100, 100, 200, 200),
        ],
        "kernel_summary": [
            TOTALS_HEADER,
            ("silu", 3, 300, 100, 59.11),
            ("gemm", 3, 150, 50, 29.56),
            ("rmsnorm", 3, 50, 16.667, 9.85),
            ("gather", 1, 5, 5, 0.99),
            ("Memcpy DtoH", 1, 2.5, 2.5, 0.49),
            ("TOTAL", 11, 507.5, 46.136, 100),
        ],
    }
    page = openpyxl.load_workbook("prefill_breakdown.xlsx")["prefill"]
    assert {str(merged) for merged in page.merged_cells.ranges} == {"A2:A3", "E2:E3", "F2:F3", "H2:H3"}
    assert not Path("decode_breakdown.xlsx").exists()


def capture(trace: HandMadeTrace, kernels: dict[str, int]) -> None:
    """First without capturing, as it is run to compile; then captured."""

    def module(path: str, launches: int, kernel: bool) -> None:
        one = partial(trace.launch, *([("warm", 1.0)] if kernel else []), call="cuLaunchKernelEx")
        trace.range(path, *[one] * launches)

    for kernel in (True, False):
        content = [partial(module, path, launches, kernel) for path, launches in kernels.items()]
        trace.range("capture_graph_bs_4", *content)


def replayed_step(trace: HandMadeTrace, times: list[float]) -> None:
    kernels = [(f"k{place}", time) for place, time in enumerate(times)]
    graph = partial(trace.launch, *kernels, call="cudaGraphLaunch")
    copy = partial(trace.launch, ("Memcpy HtoD", 1.0), call="cudaMemcpyAsync")
    trace.range("decode[bs=3 tok=3 d=3]", copy, partial(trace.range, "replay_graph_bs_4", graph))


LAUNCHES = {
    "model.embed_tokens": 1,
    "model.layers.0.mlp": 2,
    "model.layers.1.mlp": 2,
    "model.layers.2.mlp": 1,
    "model.layers.3.mlp": 2,
}


def test_a_replayed_step_takes_its_modules_from_the_capture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captured, trace = HandMadeTrace(), HandMadeTrace()
    capture(captured, {"model.layers.9.mlp": 3})
    captured.write(tmp_path / CAPTURE.replace("115900", "115800"))  # of an earlier server
    captured = HandMadeTrace()
    capture(captured, LAUNCHES)
    captured.write(tmp_path / CAPTURE)
    later = HandMadeTrace()
    later.write(tmp_path / CAPTURE.replace("115900", "120500"))
    replayed_step(trace, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    run(monkeypatch, parse_trace, str(trace.write(tmp_path / RUN)), "--layer", "1")
    layer, totals = sheets("decode_breakdown.xlsx").values()
    assert layer[1:] == [
        ("mlp", "k3", 4, 44.44, 9, 100, None, None),
        (None, "k4", 5, 55.56, None, None, None, None),
        ("TOTAL", None, 9, 100, 9, 100, None, None),
    ]
    assert totals[-1] == ("TOTAL", 9, 37, 4.111, 100)


def test_layers_that_alternate_are_averaged_with_their_like(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = HandMadeTrace()
    layers = [
        partial(trace.range, f"model.layers.{number}.mlp", partial(trace.launch, (name, time)))
        for number, (name, time) in enumerate([("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 6.0)])
    ]
    trace.range("decode[bs=1 tok=1 d=1]", *layers)
    run(monkeypatch, parse_trace, str(trace.write(tmp_path / RUN)), "--layer", "1")
    assert sheets("decode_breakdown.xlsx")["decode"][1] == ("mlp", "b", 2, 100, 2, 100, 4, 4)
    assert "averages: over every other one of layers 1 to 3" in capsys.readouterr().out


def test_without_kernels_the_outermost_operators_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = HandMadeTrace()
    linear = partial(trace.operator, "aten::linear", 20.0, partial(trace.operator, "aten::mm", 15.0))
    content = [linear, partial(trace.operator, "aten::silu", 4.0)]
    trace.range("decode[bs=1 tok=1 d=1]", partial(trace.range, "model.layers.0.mlp", *content))
    trace.operator("aten::elsewhere", 100.0)
    run(monkeypatch, parse_trace, str(trace.write(tmp_path / RUN)), "--layer", "0")
    layer, totals = sheets("decode_breakdown.xlsx").values()
    assert [row[:4] for row in layer[1:]] == [
        ("mlp", "aten::linear", 20, 83.33),
        (None, "aten::silu", 4, 16.67),
        ("TOTAL", None, 24, 100),
    ]
    assert totals[-1][:3] == ("TOTAL", 2, 24)


def overlapping_steps(trace: HandMadeTrace) -> None:
    """Two streams, each busy for 50 of the first step's microseconds; the second step is placed early."""
    norm = partial(trace.place, ("norm", 0.0, 10.0))
    products = partial(trace.place, ("gemm", 2.0, 30.0), ("inside", 5.0, 25.0), ("gemm", 28.0, 45.0))
    overlapping = partial(trace.place, ("expert", 0.0, 40.0), ("expert", 30.0, 50.0), stream=8)
    after_a_gap = partial(trace.place, ("draw", 60.0, 65.0))
    layer = partial(trace.range, "model.layers.0.mlp", norm, products, overlapping)
    trace.range("decode[bs=1 tok=1 d=1]", layer, after_a_gap)
    trace.range("decode[bs=1 tok=1 d=1]", partial(trace.place, ("norm", 62.0, 73.0)))


def test_kernels_that_overlap_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = HandMadeTrace()
    overlapping_steps(trace)
    path = str(trace.write(tmp_path / RUN))
    run(monkeypatch, parse_trace, path, "--layer", "0")
    layer, totals = sheets("decode_breakdown.xlsx").values()
    assert sorted(row[1:3] for row in layer[1:-1]) == [
        *(("expert", 10), ("expert", 40)),
        *(("gemm", 15), ("gemm", 20), ("inside", 0), ("norm", 10)),
    ]
    assert [row[:3] for row in totals[1:]] == [
        *(("expert", 2, 50), ("gemm", 2, 35), ("norm", 1, 10), ("draw", 1, 5), ("inside", 1, 0)),
        ("TOTAL", 7, 100),
    ]
    run(monkeypatch, analyze_trace_summary, path, "--output", "report.md")
    report = Path("report.md").read_text()
    assert "| 0.054 | 0.108 |" in report, "both steps' kernels: 100 and 8 microseconds"
    assert "| norm | 2 | 0.018 | 9.0 |" in report


def unmarked(trace: HandMadeTrace) -> None:
    trace.range("decode[bs=1 tok=1 d=1]", partial(trace.launch, ("k", 1.0)))


def no_steps(trace: HandMadeTrace) -> None:
    trace.launch(("k", 1.0))


def one_layer(trace: HandMadeTrace) -> None:
    eager_step(trace, "prefill[bs=1 tok=7 ctx=[7]]", [1.0])


def only_others(trace: HandMadeTrace) -> None:
    trace.range("draft[bs=1 tok=1]", partial(trace.launch, ("k", 1.0)))


def replayed(trace: HandMadeTrace) -> None:
    replayed_step(trace, [1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unmarked, "names no module of a layer: record with --mark-trace"),
        (no_steps, "has no steps: record while the engine generates"),
        (one_layer, "has layers 0 to 0, not 3"),
        (only_others, "has neither a prefill nor a decode step"),
        (replayed, "no capture trace has the modules of graph bs_4"),
    ],
)
def test_what_a_trace_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any, reason: str
) -> None:
    trace = HandMadeTrace()
    make(trace)
    path = trace.write(tmp_path / RUN)
    with pytest.raises(SystemExit, match=reason):
        run(monkeypatch, parse_trace, str(path))


def test_a_capture_of_another_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captured, trace = HandMadeTrace(), HandMadeTrace()
    capture(captured, LAUNCHES)
    replayed_step(trace, [1.0, 2.0])
    path = trace.write(tmp_path / RUN)
    with pytest.raises(SystemExit, match="captured with 8 launches and ran 2 kernels"):
        run(monkeypatch, parse_trace, str(path), "--capture-trace", str(captured.write(tmp_path / "c.gz")))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"traceEvents": 3}', b"\x1f\x8bno", b"[1, 2"])
def test_other_files_are_no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    for module in (parse_trace, analyze_trace_summary):
        with pytest.raises(SystemExit, match="is no trace of torch's profiler"):
            run(monkeypatch, module, str(path))
        with pytest.raises(SystemExit, match="No such file"):
            run(monkeypatch, module, str(tmp_path / "nowhere"))


def test_the_report_has_a_line_for_each_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = HandMadeTrace()
    eager_step(trace, "prefill[bs=1 tok=7 ctx=[7]]", [1.0])
    for time in (1000.0, 3000.0):
        launch = partial(trace.launch, ("a|b", time))
        trace.range("decode[bs=1 tok=1 d=1]", launch)
    trace.range("draft[bs=1 tok=1]")
    path = trace.write(tmp_path / RUN)
    run(monkeypatch, analyze_trace_summary, str(path), "--output", "report.md")
    lines = Path("report.md").read_text().splitlines()
    assert lines[0] == f"# {RUN}"
    phases = [line.split(" | ") for line in lines if line.startswith(("| prefill", "| decode", "| draft"))]
    assert [(line[0], line[1], *line[-2:]) for line in phases] == [
        ("| prefill", "1", "0.107", "0.107 |"),
        ("| decode", "2", "2.000", "4.000 |"),
        ("| draft", "1", "0.000", "0.000 |"),
    ]
    assert "| a\\|b | 2 | 4.000 | 2000.0 | 100.0% |" in lines
