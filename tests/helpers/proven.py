"""What the tests of models have proven, as a file that docs/models.md is made of."""

import datetime
import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import TINY_MODELS, Tiny, build_tiny
from tools.models_table import PROOFS


def described(model: Tiny) -> dict[str, Any]:
    """A row, so that the record tells when it has changed since."""
    return {"family": model.model_type, "seed": model.seed, "scale": model.scale, "config": model.config}


class Proofs:
    """Collects the tests that passed."""

    def __init__(self) -> None:
        self._passed: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def add(self, name: str, tp: int, proof: str) -> None:
        """The row of that name stood this proof, on so many ranks."""
        assert proof in PROOFS, proof
        self._passed[name][proof].add(tp)

    def write(self, path: Path) -> None:
        """AssertionError unless every row stood every kind of proof."""
        for model in TINY_MODELS:
            missing = PROOFS.keys() - self._passed[model.name].keys()
            assert not missing, f"{model.name} was not tested for: {', '.join(sorted(missing))}"
        record = {
            "date": datetime.date.today().isoformat(),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "models": {model.name: self._entry(model) for model in TINY_MODELS},
        }
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _entry(self, model: Tiny) -> dict[str, Any]:
        passed = self._passed[model.name]
        return described(model) | {
            "architecture": type(build_tiny(model)).__name__,
            "proven": {proof: sorted(passed[proof]) for proof in PROOFS},
        }
