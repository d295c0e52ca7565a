import re

import pytest

from tests.helpers.source import ROOT
from tools.reliability_table import REQUIREMENTS, Requirement, reliability_table


def test_every_requirement_is_listed_once() -> None:
    assert [each.name for each in REQUIREMENTS] == [f"R{number}" for number in range(1, 35)]
    assert reliability_table().count("\n") == len(REQUIREMENTS) + 1


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda each: each.name)
def test_its_tests_exist(requirement: Requirement) -> None:
    for test in requirement.tests:
        path, _, name = test.partition("::")
        file, *_ = path.split()  # a program's flags follow
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), test
