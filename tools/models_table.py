"""Writes docs/models.md from the results of tests/models.

python -m tools.models_table
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = _ROOT / "docs" / "models.md"
PROVEN = _ROOT / "tests" / "models" / "proven.json"

PROOFS = {
    "mixed": "mixed lengths",
    "chunked": "chunks of 16",
    "prefix": "prefix cache",
    "preempted": "preempted",
    "logits": "logits",
    "tensors": "tensors",
}
"""Column headings of the kinds of test."""

_HEAD = """\
# Models

`model_type` and the architecture in a checkpoint's config.json decide whether it runs; anything else is
refused by name at start, with the list of what runs. `make models` writes this page from the results of
`tests/models`.

Each configuration is a tiny random model that transformers saves and the engine serves, with all its
processes, in float32 on a CPU. Transformers computes the expected results without a cache. A configuration
counts only if each result has at least 16 distinct tokens of 32, and a top-2 margin of at least 0.001 at
every step.

| test | what equals transformers |
|---|---|
| mixed lengths | 32 greedy tokens each of prompts of 5, 37 and 64 tokens that run together |
| chunks of 16 | the same with 16 tokens a step, in blocks of 4 |
| prefix cache | the same with an empty prefix cache, and with the prompt cached |
| preempted | the same with a KV cache for the longest request only, so that others are preempted |
| logits | log probabilities at every position, also of the top 20 tokens, within 0.0001 |
| tensors | the logits after changing one tensor of each kind in the checkpoint, which must change them |

The first configuration of each family is also tested with whole prompts in one step, and with prompts
that continue a cached result.

RoPE types whose frequencies depend on the sequence length (dynamic, longrope) use those of
`--max-model-len` for every sequence, because cached keys cannot change; transformers uses each sequence's
length. They are equal if `--max-model-len` is at most the original context length.

The numbers below are the tensor-parallel sizes that passed.
"""


def main() -> None:
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(json.loads(PROVEN.read_text(encoding="utf-8"))), encoding="utf-8")


def document(record: dict[str, Any]) -> str:
    """The whole page."""
    families: dict[str, list[str]] = defaultdict(list)
    for name, entry in record.items():
        families[entry["family"]].append(name)
    sections = [_overview(record, families)]
    sections += [_section(family, record, names) for family, names in families.items()]
    return "\n".join([_HEAD, *sections])


def _overview(record: dict[str, Any], families: dict[str, list[str]]) -> str:
    """One line for each family: the tests that all its configurations passed."""
    rows = []
    for family, names in families.items():
        entries = [record[name] for name in names]
        architectures = ", ".join(f"`{name}`" for name in _values(entries, "architecture"))
        rows.append([f"`{family}`", architectures, str(len(names)), *_passed_by_all(entries)])
        rows[-1] += [min(_values(entries, "date")), ", ".join(_values(entries, "transformers"))]
    head = ["model_type", "architectures", "configurations", *PROOFS.values(), "date", "transformers"]
    return _table(head, rows)


def _values(entries: list[dict[str, Any]], field: str) -> list[str]:
    return sorted({entry[field] for entry in entries})


def _passed_by_all(entries: list[dict[str, Any]]) -> list[str]:
    cells = []
    for proof in PROOFS:
        sizes = set.intersection(*(set(entry["proven"][proof]) for entry in entries))
        cells.append(", ".join(map(str, sorted(sizes))))
    return cells


def _section(family: str, entries: dict[str, Any], names: list[str]) -> str:
    rows = [[f"`{name}`", _settings(entries[name]["config"])] for name in names]
    return f"## {family}\n\n" + _table(["configuration", "differs from the common one in"], rows)


def _settings(config: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={json.dumps(value)}`" for key, value in config.items()) or "nothing"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
