"""The README is short, and its figures, models and promises are those of the code and the results."""

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import atom
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import fields_of
from atom.shared.config.not_yet import REFUSED
from atom.shared.utils.version import atom_version
from tests.helpers.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 150

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


def read_json(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return content


def test_length() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_decode_times_are_the_recorded_ones() -> None:
    text = " ".join(README.split())
    vllm = read_json("benchmarks/pages/recorded.json")["models"]
    for model in ("Qwen3-0.6B", "Qwen3-8B"):
        ours = read_json(f"docs/measurements/results/{model}.json")["rows"]["batch-256"]["value"]
        assert f"{model} {ours:.2f} ms (vLLM {vllm[model]['batch-256']['vllm']:.2f} ms)" in text


def test_models_are_those_that_the_tests_have_proven() -> None:
    proven = read_json("tests/models/proven.json")
    families = {entry["family"] for entry in proven.values()}
    assert f"{len(proven)} configurations of {len(families)} model families" in README
    columns = re.findall(r"^\|[^|]+\| ((?:`\w+ForCausalLM`(?:, )?)+) \|", README, re.MULTILINE)
    architectures = [name for column in columns for name in re.findall(r"`(\w+)`", column)]
    assert sorted(architectures) == sorted({entry["architecture"] for entry in proven.values()})


def test_accuracy_is_the_recorded_one() -> None:
    result = read_json("docs/measurements/results/smollm2-accuracy.json")
    assert result["different_texts"] == 0
    said = f"{result['answers']} lm-eval requests give the same texts, and log probabilities within "
    assert f"{said}{result['largest_difference']:.1e}" in README


def test_folders_are_those_of_the_repository() -> None:
    named = set(re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \|", README, re.MULTILINE))
    folders = {name for group in named for name in re.findall(r"`(\w+)/`", group)}
    assert folders == {path.name for path in ROOT.iterdir() if path.is_dir() and is_source(path)} - {"docs"}


def test_the_reading_list_is_the_code() -> None:
    files = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.MULTILINE)
    assert len(files) >= 10
    for path, lines in files:
        real = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert abs(real - int(lines)) <= 0.2 * real, f"{path} has {real} lines"


def is_source(folder: Path) -> bool:
    return not folder.name.startswith(".") and any(
        path.suffix in (".py", ".md") for path in folder.rglob("*") if "__pycache__" not in path.parts
    )


def test_every_documented_flag_of_atom_is_known() -> None:
    served = {field.name for concern in fields(EngineConfig) for field in fields_of(concern.default_factory)}
    assert not served & REFUSED.keys()
    assert set(DOCUMENTED_FLAGS) <= served | REFUSED.keys()


def test_public_names() -> None:
    assert atom.__all__ == [
        *("AsyncLLMEngine", "EngineArgs", "LLMEngine"),
        *("RequestOutput", "SamplingParams", "StructuredOutputsParams"),
    ]
    for name in atom.__all__:
        assert getattr(atom, name).__name__ == name
    assert atom.__version__ == atom_version()


def test_the_newest_release_notes_are_of_the_version_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", project["version"]]
