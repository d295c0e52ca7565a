"""Records the rows that passed the tests of models; docs/use/models.md is written from it."""

import datetime
import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints.tiny_models import TINY_MODELS, Tiny, build_tiny, tiny
from tools.models_table import PROOFS

ON_ONE_RANK = ("tensors",)
"""Proofs that run on one rank; the others run on one and on two."""


def described(model: Tiny) -> dict[str, Any]:
    """The row as recorded, to detect later changes."""
    found = {"family": model.model_type, "seed": model.seed, "scale": model.scale, "config": model.config}
    return found if model.embedding == Tiny.embedding else found | {"embedding": model.embedding}


def still_holds(entry: dict[str, Any], model: Tiny) -> bool:
    """Whether the entry was recorded for this row unchanged."""
    return described(model).items() <= entry.items()


class Proofs:
    """Collects the tests that passed, row by row."""

    def __init__(self) -> None:
        self._passed: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._failed: set[str] = set()

    def add(self, name: str, tp: int, proof: str) -> None:
        """The row passed this proof on `tp` ranks."""
        assert proof in PROOFS, proof
        self._passed[name][proof].add(tp)

    def fail(self, name: str) -> None:
        """The row failed one of its tests."""
        self._failed.add(name)

    def update(self, path: Path) -> list[str]:
        """Record the rows that passed everything, drop those that failed or changed; returns the former."""
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept = {
            model.name: old[model.name]
            for model in TINY_MODELS
            if model.name not in self._failed and still_holds(old.get(model.name, {}), model)
        }
        found = {name: self._entry(tiny(name)) for name in self._passed if self._is_whole(name)}
        both = kept | found
        record = {model.name: both[model.name] for model in TINY_MODELS if model.name in both}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return list(found)

    def _is_whole(self, name: str) -> bool:
        sizes = {proof: {1} if proof in ON_ONE_RANK else {1, 2} for proof in PROOFS}
        return name not in self._failed and self._passed[name] == sizes

    def _entry(self, model: Tiny) -> dict[str, Any]:
        passed = self._passed[model.name]
        return described(model) | {
            "architecture": type(build_tiny(model)).__name__,
            "proven": {proof: sorted(passed[proof]) for proof in PROOFS},
            "date": datetime.date.today().isoformat(),
            "transformers": version("transformers"),
            "torch": version("torch"),
        }
