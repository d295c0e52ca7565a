"""docs/use/quantization.md lists the formats and models of the tests."""

from tools.quantization_table import DOCUMENT, document


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run `make docs`"


def test_no_cell_is_empty() -> None:
    rows = [line.split("|")[1:-1] for line in document().splitlines() if line.startswith("|")]
    assert len(rows) > 10 and all(cell.strip() for row in rows for cell in row)
