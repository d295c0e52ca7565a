"""The documents: generated tables are up to date, links resolve, and nothing of the API is left out."""

import re
from pathlib import Path

import pytest

from atom.shared.utils.exit_status import ExitStatus
from frontend.api.chat.schema import CHAT
from frontend.api.completions.schema import COMPLETIONS
from frontend.api.schemas.generation import StreamOptions
from frontend.api.tokenization.schema import DETOKENIZE, TOKENIZE
from tests.helpers.source import PACKAGES, ROOT
from tools.docs_tables import TABLES, with_table

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACE = re.compile(
    rf"`((?:{'|'.join((*PACKAGES, 'benchmarks', 'deploy', 'docs', 'tests', 'tools'))})/[\w/.-]*)`"
)
"""A file or folder of the repository that a page names."""
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The ids that GitHub gives the headings of a page."""
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    """The links of a page whose file or heading is missing."""
    broken = []
    for link in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_folders_that_a_page_names_exist(path: Path) -> None:
    named = PLACE.findall(path.read_text(encoding="utf-8"))
    assert [place for place in named if not (ROOT / place).exists()] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, here\n[a](#a-title-here) [b](#other) [c](none.md) [d](https://example.org)\n")
    assert broken_links(page) == ["#other", "none.md"]


def test_every_page_is_linked_from_the_readme_or_the_index() -> None:
    readme, index = ROOT / "README.md", ROOT / "docs/README.md"
    assert index in linked(readme)
    assert set(DOCUMENTS) - {readme} <= linked(readme) | linked(index)


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / link.partition("#")[0]).resolve() for link in links}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_table(text, TABLES[page]()) == text, "run `make docs`"


def test_a_page_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page has no"):
        with_table("# Flags\n", "table")


@pytest.mark.parametrize(
    "schema", [CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE], ids=lambda one: one.struct.__name__
)
def test_every_request_field_is_documented(schema: object) -> None:
    text = (ROOT / "docs/use/http-api.md").read_text(encoding="utf-8")
    names = {*schema.struct.__struct_fields__, *schema.harmless, *StreamOptions.__struct_fields__}  # type: ignore[attr-defined]
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("page", ["docs/operate/operations.md", "deploy/README.md"])
def test_every_exit_status_is_documented(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d) \|", text, re.MULTILINE) == [str(int(status)) for status in ExitStatus]
