"""The tables of families in hosts say what was equal, what differs and what did not run."""

from dataclasses import dataclass
from pathlib import Path

from tests.helpers.checkpoints.tiny_models import Tiny, tiny
from tests.helpers.plugins.host_table import marks, table, write_table


@dataclass(frozen=True)
class Ran:
    name: str
    row: Tiny
    attention: str


RUNS = [
    Ran("a", tiny("llama-gqa"), "ours"),
    Ran("b", tiny("llama-gqa"), "theirs"),
    Ran("c", tiny("deepseek-v3"), "ours"),
]


def test_each_cell_has_its_result() -> None:
    lines = table("vLLM", RUNS, {"a": [], "b": ["wrong"]}, ("ours", "theirs"))
    assert lines[0] == "| `model_type` | ours attention | theirs attention |"
    assert lines[2:] == [
        "| `deepseek_v3` | not run | vLLM's own model |",
        "| `llama` | equal ids | differs |",
    ]


def test_only_the_host_s_own_table_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = marks("vLLM")
    page.write_text(f"before\n{begin}\nold\n{end}\n{marks('SGLang')[0]}\nkept")
    write_table(page, "vLLM", RUNS, {"a": [], "b": [], "c": []}, ("ours", "theirs"))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nkept") and "old" not in text
    assert "| `llama` | equal ids | equal ids |" in text
