"""What CONTRIBUTING shows being added (a family, a quantization scheme, a speculation method) is the code."""

import re

from tests.helpers.source import ROOT

DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n@@ .*\n(?:-.*\n)*((?:[ +].*\n|\+\n)+)", re.MULTILINE)


def test_the_examples_are_what_the_repository_holds() -> None:
    diffs = DIFF.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    shown = [file for diff in diffs for file in FILE.findall(diff)]
    assert len(diffs) >= 3 and len(shown) >= 8
    for before, path, lines in shown:
        text = (ROOT / path).read_text(encoding="utf-8")
        part = "".join(line[1:] for line in lines.splitlines(keepends=True))
        assert part == text if before == "/dev/null" else part in text, path
