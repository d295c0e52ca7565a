"""docs/models.md says what the tests of models have proven, about the rows as they stand."""

import json

from tests.helpers.proven import described
from tests.helpers.tiny_models import TINY_MODELS
from tools.models_table import DOCUMENT, PROVEN, document
from workers.families import families

RECORD = json.loads(PROVEN.read_text(encoding="utf-8"))


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(RECORD), "run `python -m tools.models_table`"


def test_the_rows_are_those_that_were_proven() -> None:
    proven = {
        name: {key: entry[key] for key in ("family", "seed", "scale", "config")}
        for name, entry in RECORD["models"].items()
    }
    assert proven == {model.name: described(model) for model in TINY_MODELS}, "run `make models`"


def test_every_family_is_proven() -> None:
    assert {entry["family"] for entry in RECORD["models"].values()} == set(families())


def test_every_proof_was_stood_on_one_rank_and_those_of_the_engine_on_two() -> None:
    for name, entry in RECORD["models"].items():
        for proof, sizes in entry["proven"].items():
            assert sizes == ([1] if proof == "tensors" else [1, 2]), f"{name}: {proof}"
