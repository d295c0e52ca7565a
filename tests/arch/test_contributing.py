"""The family that CONTRIBUTING shows being added is the one that runs."""

import re

from tests.helpers.source import ROOT

DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^\+\+\+ b/(\S+)\n@@ .*\n((?:[ +].*\n|\+\n)+)", re.MULTILINE)


def test_the_example_is_what_the_repository_holds() -> None:
    (diff,) = DIFF.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    shown = dict(FILE.findall(diff))
    assert set(shown) == {"workers/models/qwen2.py", "tests/helpers/tiny_models.py"}
    for path, lines in shown.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        part = "".join(line[1:] for line in lines.splitlines(keepends=True))
        assert part == text if path.startswith("workers") else part in text, path
