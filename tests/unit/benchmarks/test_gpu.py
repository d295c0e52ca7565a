"""The arithmetic, the results files and the document of the GPU benchmark."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu import ModelRun
from benchmarks.gpu_runs.gpu_document import gpu_section, recorded, speed_up, terminal_table
from benchmarks.gpu_runs.gpu_results import Content, Entry, ResultFile, Settings, SettingsError
from benchmarks.gpu_runs.gpu_rows import READY, READY_FIRST, ROWS, Measured, figure_of, measure, shown
from tests.helpers.source import ROOT

MODELS = ROOT / "benchmarks/models"
SETTINGS = Settings("1 GPU", "ATOM 1", {"max_model_len": 8192, "enforce_eager": True})
FULL = ROWS["batch-64"]


@pytest.mark.parametrize(
    ("name", "whole", "prompts", "figure"),
    [
        ("batch-1", [0.265, 0.270, 9.0], [0.015, 0.010, 0.015], 1.0),
        ("batch-64", [0.138, 0.138, 0.138], [0.010, 0.010, 9.0], 1.0),
        ("64x1024-256", [2.0, 2.0, 3.0], [], 8192.0),
        ("prefill-64x4096", [1.0, 3.0], [], 131072.0),
        ("first-token-1024", [0.5, 0.002, 0.003, 0.004, 0.001], [], 3.0),
        ("ready", [17.5], [], 17.5),
    ],
)
def test_figures_come_from_medians(
    name: str, whole: list[float], prompts: list[float], figure: float
) -> None:
    assert figure_of(ROWS[name], whole, prompts) == pytest.approx(figure)


def test_a_step_is_timed_as_a_difference_after_one_warm_up() -> None:
    calls: list[tuple[int, int, int]] = []

    def seconds(requests: int, input_len: int, output_len: int) -> float:
        calls.append((requests, input_len, output_len))
        return 0.1 + 0.005 * (output_len - 1)

    measured = measure(FULL, seconds)
    assert measured.value == pytest.approx(5.0)
    assert calls == [(64, 32, 129)] + [(64, 32, 1), (64, 32, 129)] * 3
    assert len(measured.seconds) == len(measured.prompt_seconds) == 3


def test_other_rows_run_one_shape_only() -> None:
    calls: list[tuple[int, int, int]] = []
    measure(ROWS["prefill-64x4096"], lambda *shape: calls.append(shape) or 1.0)  # type: ignore[func-returns-value]
    assert calls == [(64, 4096, 1)] * 3


def test_shrinking_keeps_a_single_token_single() -> None:
    assert ROWS["256x512-256"].shrunk(100).output_len == 2
    assert ROWS["prefill-64x4096"].shrunk(100).output_len == 1
    assert ROWS["batch-1"].shrunk(1000).requests == ROWS["batch-1"].shrunk(1000).input_len == 1
    assert ROWS["ready"].shrunk(9) is READY


def test_results_grow_by_row_and_keep_their_settings(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results", "Tiny-1.5")
    assert file.read() is None
    file.add(SETTINGS, "batch-64", Measured(4.98765432, [0.6], [0.01]))
    file.add(SETTINGS, "ready", Measured(12.0, [12.0], []))
    content = file.read()
    assert content is not None and content.settings == SETTINGS
    assert content.rows["batch-64"].value == 4.9877 and set(content.rows) == {"batch-64", "ready"}
    assert [path.name for path in file.directory.iterdir()] == ["Tiny-1.5.json"]
    other = msgspec.structs.replace(SETTINGS, hardware="2 GPUs")
    with pytest.raises(SettingsError, match="other hardware .*--fresh"):
        file.add(other, "batch-1", Measured(1.0, [1.0], []))
    with pytest.raises(SettingsError, match="other options .*--results"):
        file.check_options({"max_model_len": 4096}, 1)
    with pytest.raises(SettingsError, match="other options"):
        file.check_options(SETTINGS.options, 2)
    file.check_options(SETTINGS.options, 1)
    file.remove({"ready"})
    assert set((file.read() or content).rows) == {"batch-64"}
    file.remove({"batch-64"})
    file.remove({"batch-64"})
    assert file.read() is None


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "Tiny.json").write_text("[]")
    with pytest.raises(SettingsError, match=r"Tiny\.json holds no results"):
        ResultFile(tmp_path, "Tiny").read()


def test_only_what_is_missing_is_started(tmp_path: Path) -> None:
    file = ResultFile(tmp_path, "Tiny")

    def starts(*rows: str) -> list[list[str]]:
        return ModelRun(file, "tiny", {}, list(rows), 1).starts()

    assert starts("batch-1", "ready", "ready-first") == [["ready-first"], ["batch-1", "ready"]]
    assert starts("batch-1", "batch-64") == [["batch-1", "batch-64"]]
    file.add(SETTINGS, READY_FIRST.name, Measured(30.0, [30.0], []))
    assert starts("ready", "ready-first") == [[], ["ready"]]  # caches may be cold again by now
    file.add(SETTINGS, READY.name, Measured(15.0, [15.0], []))
    assert starts("ready", "ready-first", "batch-1") == [["batch-1"]]
    assert starts("ready", "ready-first") == []


def results(shrink: int = 1) -> dict[str, Content]:
    rows = {
        "ready": Entry(25.1, "2026-01-02", [25.1]),
        "batch-1": Entry(2.6041, "2026-01-02", [0.7], [0.1]),
        "prefill-64x4096": Entry(20272.5, "2026-01-02", [9.0]),
    }
    return {"Qwen3-8B": Content(msgspec.structs.replace(SETTINGS, shrink=shrink), rows)}


def test_the_document_puts_each_figure_next_to_the_recorded_ones() -> None:
    text = gpu_section(results())
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    assert list(lines) == ["`batch-1`", "`prefill-64x4096`", "`ready`"]
    cells = [cell.strip() for cell in lines["`batch-1`"].split("|")[2:-1]]
    assert cells[1:] == ["2.604", "ms/token", "5.208", "2.00x", "3.390", "4.100", "2026-01-02"]
    assert "| 20,272 | prompt tok/s | 40,545 | 0.50x | 50,416 | 40,500 |" in lines["`prefill-64x4096`"]
    assert "| 25.1 | s |  |  |  | 20.0 |" in lines["`ready`"]
    for fact in ("1 GPU", "ATOM 1", "--models Qwen3-8B --max-model-len 8192 --enforce-eager`"):
        assert fact in text
    assert "A trial" not in text


def test_a_trial_is_called_one_and_compared_with_nothing() -> None:
    text = gpu_section(results(shrink=8))
    assert "A trial: requests and lengths divided by 8" in text and "--shrink 8" in text
    assert "40,545" not in text


def test_the_table_on_the_terminal_holds_the_same() -> None:
    table = terminal_table(results())
    assert "Qwen3-8B" in table and "2.00x" in table and "ms/token" in table
    assert len({len(line) > 0 for line in table.splitlines()}) == 1


def test_speed_up_knows_which_way_is_better() -> None:
    assert speed_up(ROWS["batch-1"], 1.0, 2.0) == 2.0
    assert speed_up(ROWS["prefill-64x4096"], 1.0, 2.0) == 0.5
    assert shown(ROWS["ready"], 19.96) == "20.0" and shown(ROWS["batch-64"], 1.2) == "1.200"


def test_recorded_figures_are_of_known_rows_and_possible() -> None:
    assert set(gpu._MODELS) <= set(recorded().models) <= {path.name for path in MODELS.iterdir()}
    for model, rows in recorded().models.items():
        assert set(rows) == set(ROWS) if model in gpu._MODELS else set(rows) <= set(ROWS)
        for name, comparison in rows.items():
            for value in (comparison.vllm, comparison.mark, comparison.aim):
                if value is not None and comparison.floor is not None:
                    assert speed_up(ROWS[name], comparison.floor, value) > 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen3-0.6B", 596_049_920), ("Qwen3-8B", 8_190_735_360), ("Llama-3.1-8B", 8_030_261_248)],
)
def test_shipped_configurations_make_models_of_the_published_size(name: str, parameters: int) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(weight.numel() for weight in model.parameters()) == parameters
