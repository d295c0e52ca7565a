"""docs/use/models.md says what the tests of models have proven, about the rows as they stand."""

import json
from pathlib import Path

from tests.helpers.checkpoints.proven import Proofs, still_holds
from tests.helpers.checkpoints.tiny_models import TINY_MODELS
from tools.models_table import DOCUMENT, PROOFS, PROVEN, document

RECORD = json.loads(PROVEN.read_text(encoding="utf-8"))
ROW = TINY_MODELS[0].name


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(RECORD), "run `python -m tools.models_table`"


def test_every_row_is_proven_as_it_stands() -> None:
    proven = [
        model.name for model in TINY_MODELS if model.name in RECORD and still_holds(RECORD[model.name], model)
    ]
    assert proven == [model.name for model in TINY_MODELS] == list(RECORD), "run `make models`"


def stood(proofs: Proofs, *sizes: int) -> Proofs:
    for proof in PROOFS:
        for tp in (1,) if proof == "tensors" else sizes:
            proofs.add(ROW, tp, proof)
    return proofs


def test_a_row_is_recorded_when_it_stood_everything(tmp_path: Path) -> None:
    file = tmp_path / "proven.json"
    assert stood(Proofs(), 1).update(file) == []
    assert stood(Proofs(), 1, 2).update(file) == [ROW]
    assert Proofs().update(file) == []
    assert list(json.loads(file.read_text())) == [ROW]


def test_a_row_that_failed_or_changed_is_recorded_no_longer(tmp_path: Path) -> None:
    file = tmp_path / "proven.json"
    stood(Proofs(), 1, 2).update(file)
    entry = json.loads(file.read_text())[ROW]
    file.write_text(json.dumps({ROW: entry | {"seed": entry["seed"] + 1}}))
    Proofs().update(file)
    assert json.loads(file.read_text()) == {}
    stood(Proofs(), 1, 2).update(file)
    failed = stood(Proofs(), 1, 2)
    failed.fail(ROW)
    assert failed.update(file) == []
    assert json.loads(file.read_text()) == {}
