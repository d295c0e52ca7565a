"""The tables of docs/measurements/roofline.md: recorded steps against the least time that they could take.

Bytes, operations and floors are computed from the models' configurations; the times are read from the kept
results and from steps.toml next to them, which has those that stand only in a text.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs.gpu_rows import TIMED, Figure
from benchmarks.simulation.roofline import H200
from benchmarks.simulation.step_floor import StepFloor, StepShape, step_floor

__all__ = ["Profile", "Step", "profiles", "recorded_steps", "rest_of", "roofline_tables"]

_RESULTS = Path(__file__).resolve().parents[1] / "docs/measurements/results"
_READ_BYTES_PER_S = {"H200": H200.bytes_per_s, "H100": 3350e9}
"""By card; that of an H100 is from its data sheet, and was not measured."""
_DRAFT_HEADS = {"eagle3": "-EAGLE3"}
_NOT_PROFILED = "not profiled"
_NO_DATE = "no date"
_BELOW = "[below](#where-the-rest-goes)"
_PROFILES = "benchmarks.md#decode-steps"

KINDS = {
    "GEMMs": [
        *("_gemv", "gemv_rows", "_gemv_rows", "_gemm", "_stream_k", "_reduce_split_k", "_grouped"),
        "_grouped_gemm",
        *("_gate_up_4bit", "_down_4bit", "cublas nvjet", "cublas dot_kernel", "cublas reduce_1Block_kernel"),
        *("cublas splitKreduce_kernel", "cublas cutlass sgemm"),
    ],
    "attention": [
        *("attend_new_tokens", "decode_attention", "_rotate_and_write_kv", "_attend", "_merge", "_compress"),
        *("_norm_and_rotate", "_index_scores", "_select_topk", "_write_rows"),
    ],
    "hyper-connections": ["_project", "_collapse", "_expand"],
    "norms and small": [
        *("_norm_rows", "_gate_and_mul", "_clamped_swiglu", "_round_rows", "_gather", "_gather_rows"),
        *(
            "_gather_rotation",
            "_gather_pairs",
            "_sum_pairs",
            "_sort",
            "_route",
            "_weights_of_experts",
            "torch",
        ),
        "not listed",
    ],
    "sampling, drafts": ["_sample_rows", "_reduce_spans", "_search", "_propose", "_verify"],
}
"""Kernels by what they do. `torch` is the sum of torch's own kernels, `not listed` what a profile cut off."""
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


@dataclass(frozen=True)
class Step:
    """One measured step."""

    model: str
    shape: StepShape
    reached_ms: float
    timed: str
    date: str
    source: str
    """A link's target, seen from docs/measurements."""
    rest: str = _NOT_PROFILED

    @property
    def title(self) -> str:
        return self.model if self.shape.tp == 1 else f"{self.model}, TP {self.shape.tp}"


@dataclass(frozen=True)
class Profile:
    """One step whose kernels are recorded."""

    model: str
    shape: StepShape | None
    """None: the model has no shipped configuration, and its floor is `floor_ms`."""
    rows: int
    drafts: str
    """What makes drafts, and how many; empty without."""
    reached_ms: float
    date: str
    microseconds: dict[str, float]
    """Time of the kernels by their name."""
    floor_ms: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.model}{self.drafts and f', {self.drafts}'}"

    def floors_ms(self) -> tuple[float, float]:
        """The time to read weights, and the cache; a recorded floor counts as that of weights.

        Raises ValueError if multiplications take longer, since their time is not split so.
        """
        if self.shape is None:
            return self.floor_ms, 0.0
        floor = step_floor(self.model, self.shape)
        if floor.bound != "bytes":
            raise ValueError(
                f"{self.title}, {self.rows} rows: FLOPs bound this step: split them by kind here"
            )
        rate = floor.device.bytes_per_s
        return floor.moved.weights / rate * 1e3, floor.moved.cache / rate * 1e3


def roofline_tables() -> str:
    """All tables, with their headings."""
    parts = [
        "## Whole models",
        _table(_STEP_COLUMNS, map(_step_row, recorded_steps()), words=2),
        "## Four layers of real width",
        _table(_FAMILY_COLUMNS, _family_rows(_recorded()["families"]), words=2),
        "## Where the rest goes",
        _table(_REST_COLUMNS, map(_rest_row, profiles())),
    ]
    return "\n\n".join(parts)


# What was measured


def recorded_steps() -> list[Step]:
    """All steps of whole models, by model, GPUs and rows."""
    found = [*_kept_steps(), *_series_steps(_recorded()["series"]), *_profiled_steps()]
    return sorted(
        found, key=lambda step: (step.title, step.shape.rows, step.shape.tokens, step.shape.context)
    )


def profiles() -> list[Profile]:
    """All recorded profiles of steps."""
    found = []
    for path in sorted(_RESULTS.glob("*.json")):
        content = _json(path)
        if content.get("benchmark") != "decode_step":
            continue
        _check_card(content["hardware"], path)
        drafts = content["drafts"]
        method = content["method"] or ""
        head = f"{content['model']}{_DRAFT_HEADS[method]}" if method in _DRAFT_HEADS else ""
        for row in content["rows"]:
            rows = row["rows"]
            context = content["context"]
            shape = None if context is None else StepShape(rows, context, 1 + drafts, draft_head=head)
            times = {one["name"]: one["microseconds"] for one in row["times"]}
            said = f"{drafts} drafts of {method}" if drafts else ""
            found.append(
                Profile(
                    content["model"], shape, rows, said, row["ahead_ms"], content["date"], times,
                    row.get("floor_ms", 0.0),
                )
            )  # fmt: skip
    return found


def _kept_steps() -> Iterator[Step]:
    """Those of the GPU benchmark, whose context is that half way through the output."""
    decodes = {row.name: row for row in TIMED if row.figure is Figure.STEP}
    for path in sorted(_RESULTS.glob("*.json")):
        content = _json(path)
        if "benchmark" in content:
            continue
        _check_card(content["settings"]["hardware"], path)
        for name, entry in content["rows"].items():
            if row := decodes.get(name):
                shape = StepShape(row.requests, row.input_len + row.output_len // 2)
                source = f"benchmarks.md#{path.stem.lower().replace('.', '')}"
                yield Step(path.stem, shape, entry["value"], "engine", entry["measured"], source)


def _series_steps(series: Iterable[dict[str, Any]]) -> Iterator[Step]:
    for one in series:
        for rows, reached_ms in one["ms"].items():
            shape = StepShape(
                int(rows), one["context"], tp=one.get("tp", 1), float8_cache=one.get("float8_cache", False)
            )
            rest = _NOT_PROFILED
            if "communication" in one:
                rest = f"all-reduces {one['communication'][rows]} ({one['communication_date']})"
            date = one.get("date", _NO_DATE)
            yield Step(one["model"], shape, reached_ms, one["timed"], date, one["section"], rest)


def _profiled_steps() -> Iterator[Step]:
    for profile in profiles():
        if profile.shape is not None:
            place = (profile.date, _PROFILES, _BELOW)
            yield Step(profile.model, profile.shape, profile.reached_ms, "ahead", *place)


def _check_card(hardware: str, path: Path) -> None:
    if H200.name not in hardware:
        raise ValueError(f"{path}: measured on {hardware}, whose rates are not known here: add its Device")


def _recorded() -> dict[str, Any]:
    return tomllib.loads((_RESULTS / "steps.toml").read_text(encoding="utf-8"))


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


# Rows of the tables

_STEP_COLUMNS = [
    *("model", "measured", "rows", "context", "attention", "dense", "experts", "head", "KV", "GB", "TFLOP"),
    *("floor, ms", "reached, ms", "share", "the rest, ms"),
]
_FAMILY_COLUMNS = [
    *("model", "measured", "floor has", "GB", "floor, ms", "1 row, ms", "share"),
    *("GB", "floor, ms", "64 rows, ms", "share", "the rest, ms"),
]
_REST_COLUMNS = [
    *("step", "rows", "floor, ms", "reached, ms", "GEMMs", "attention", "hyper-connections"),
    *("norms and small", "sampling, drafts", "gaps"),
]


def _step_row(step: Step) -> list[str]:
    shape = step.shape
    floor = step_floor(step.model, shape)
    moved = floor.moved
    dense = moved.dense + moved.drafts
    parts = (moved.attention, dense, moved.experts, moved.head, moved.cache, moved.total)
    rows = str(shape.rows) if shape.tokens == 1 else f"{shape.rows} x {shape.tokens}"
    drafting = " and draft head" if shape.draft_head else ""
    return [
        f"{step.title}{drafting}{', float8 cache' if shape.float8_cache else ''}",
        f"[{step.timed}, {step.date}]({step.source})",
        rows,
        f"{shape.context:,}",
        *map(_gigabytes, parts),
        f"{floor.operations / 1e12:.3f}",
        _floor_cell(floor),
        f"{step.reached_ms:.2f}",
        f"{floor.seconds * 1e3 / step.reached_ms:.0%}",
        step.rest,
    ]


def _floor_cell(floor: StepFloor) -> str:
    return f"{floor.seconds * 1e3:.2f}{'' if floor.bound == 'bytes' else ', FLOPs'}"


def _gigabytes(count: float) -> str:
    if not count:
        return ""
    return f"{count / 1e9:.2f}" if count >= 1e8 else f"{count / 1e9:.3f}"


def _family_rows(families: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for family in families:
        card = family["card"]
        measured = f"[{card}, {family.get('date', _NO_DATE)}]({family['section']})"
        for name, *figures in family["rows"]:
            cells = []
            for reached_ms, floor in (figures[:2], figures[2:]):
                floor_ms = reached_ms / floor if family.get("ratio") else floor
                cells += _against_floor(card, floor_ms, reached_ms)
            yield [name, measured, family["floor"], *cells, _NOT_PROFILED]
    for name, ones in groupby((one for one in profiles() if one.shape is None), lambda one: one.model):
        alone, many = sorted(ones, key=lambda one: one.rows)
        cells = [
            cell for one in (alone, many) for cell in _against_floor("H200", one.floor_ms, one.reached_ms)
        ]
        yield [name, f"[H200, {alone.date}]({_PROFILES})", "weights, cache", *cells, _BELOW]


def _against_floor(card: str, floor_ms: float, reached_ms: float) -> list[str]:
    """Gigabytes, floor, time and share."""
    moved = floor_ms / 1e3 * _READ_BYTES_PER_S[card]
    return [_gigabytes(moved), f"{floor_ms:.3f}", f"{reached_ms:.3f}", f"{floor_ms / reached_ms:.0%}"]


def rest_of(profile: Profile) -> dict[str, float]:
    """Milliseconds above the floor by kind of kernel, and `gaps`: the step without all kernels.

    They add up to the step without its floor. Raises ValueError for a kernel without a kind.
    """
    spent = dict.fromkeys(KINDS, 0.0)
    for name, microseconds in profile.microseconds.items():
        if name not in _KIND_OF:
            raise ValueError(f"{profile.title}: kernel {name} has no kind: add it to KINDS of {__name__}")
        spent[_KIND_OF[name]] += microseconds / 1e3
    gaps = profile.reached_ms - sum(spent.values())
    weights_ms, cache_ms = profile.floors_ms()
    spent["GEMMs"] -= weights_ms
    spent["attention"] -= cache_ms
    return spent | {"gaps": gaps}


def _rest_row(profile: Profile) -> list[str]:
    floor_ms = sum(profile.floors_ms())
    cells = [f"{profile.title} ({profile.date})", str(profile.rows)]
    cells += [f"{floor_ms:.2f}", f"{profile.reached_ms:.2f}"]
    return cells + [f"{each:.3f}" if each else "" for each in rest_of(profile).values()]


def _table(columns: list[str], rows: Iterable[list[str]], words: int = 1) -> str:
    """The first `words` columns are text, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))
