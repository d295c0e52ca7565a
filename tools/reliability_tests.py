"""Runs the tests that prove the requirements of docs/operate/reliability.md, and keeps what came of them.

    python -m tools.reliability_tests [R10 R24 …]

Then `python -m tools.docs_tables` writes the table. Without names all run, which takes about an hour.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from datetime import date
from pathlib import Path

import msgspec

from tools.reliability_table import REQUIREMENTS, RESULTS, Result, results

__all__ = ["main"]

_DEADLINE_S = 3600.0
_SHOWN = 8000
"""Characters of the end of a failed test's output."""
_EVALUATIONS = "tests/evaluation/"


def main(names: list[str]) -> int:
    """Exit status 1 if a test has failed."""
    wanted = [each for each in REQUIREMENTS if not names or each.name in names]
    kept = results()
    failed = False
    for test in dict.fromkeys(test for each in wanted for test in each.tests):
        kept[test] = result = _evaluated(test) if test.startswith(_EVALUATIONS) else _tested(test)
        failed |= bool(result.failed)
        print(f"{test}: {result.passed} passed, {result.failed} failed, {result.skipped} skipped", flush=True)
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(kept, order="sorted")) + b"\n")
    return int(failed)


def _tested(test: str) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            test,
        ]
        done = subprocess.run(
            command, timeout=_DEADLINE_S, check=False, stdout=subprocess.PIPE, text=True, errors="replace"
        )
        root = xml.etree.ElementTree.parse(report).getroot()
    suite = root if root.tag == "testsuite" else root[0]
    count, failures, errors, skipped = (
        int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failures + errors
    if bad:
        print(done.stdout[-_SHOWN:], flush=True)
    return Result(count - bad - skipped, bad, skipped, date.today().isoformat())


def _evaluated(test: str) -> Result:
    """A program that exits with status 0 where all was well."""
    path, *flags = test.split()
    module = path.removesuffix(".py").replace("/", ".")
    done = subprocess.run([sys.executable, "-m", module, *flags], timeout=_DEADLINE_S, check=False)
    return Result(int(not done.returncode), int(bool(done.returncode)), 0, date.today().isoformat())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
