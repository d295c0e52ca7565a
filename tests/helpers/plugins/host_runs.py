"""Runs of a host with ATOM as its plugin: checkpoints, the process, the groups of runs of its check."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints.quantized_formats import FORMATS, save_quantized
from tests.helpers.checkpoints.reference import NEW_TOKENS, PROMPTS
from tests.helpers.checkpoints.tiny_models import Tiny, build_tiny, hf_greedy
from tests.helpers.source import ROOT

MIN_MARGIN = 1e-3
DEADLINE_S = 1800
"""Limit of all runs of a group together, on a busy machine."""
PAGE = ROOT / "docs/use/plugins.md"
STAND_INS = ROOT / "tests/helpers/plugins/stand_ins"
"""Modules for hosts on a CPU, whose own fail there: torchvision's wheel does not fit torch's build for it."""


def save_and_generate(
    row: Tiny, format: str | None, directory: Path, margin: float = MIN_MARGIN
) -> list[list[int]]:
    """Saves the row's checkpoint; returns transformers' greedy ids, up to a token without that margin.

    `format` is a row of `quantized_formats`; None: a plain checkpoint.
    """
    if format is None:
        model = build_tiny(row)
        model.save_pretrained(directory)
    else:
        model = save_quantized(row, next(each for each in FORMATS if each.name == format), directory)
    greedy = [hf_greedy(model, prompt, NEW_TOKENS, margin) for prompt in PROMPTS]
    return [each.ids[:-1] if each.smallest_margin <= margin else each.ids for each in greedy]


def write_entry_points(directory: Path, more: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """The metadata of an installed ATOM, with pyproject.toml's entry points, and of a package with `more`.

    An editable install leaves metadata of ATOM in ROOT, which hides these: `more` needs another name.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _write_metadata(directory, "atom-serve", project["version"], project["entry-points"])
    if more:
        _write_metadata(directory, "atom-test-probe", "0", more)


def _write_metadata(
    directory: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]]
) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_process(command: list[str], environment: Mapping[str, str], results: Path) -> list[dict[str, Any]]:
    """The lines of JSON that the command writes to `results`, if any. Raises TimeoutExpired."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        process.wait(DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the host's children too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def wrong_ids(expected: list[list[int]], rounds: list[list[list[int]]]) -> list[str]:
    """Rounds whose ids do not begin as expected."""
    return [
        f"round {number}: {ids} instead of {expected}"
        for number, ids in enumerate(rounds)
        if any(own[: len(wanted)] != wanted for own, wanted in zip(ids, expected, strict=True))
    ]


Found = dict[str, list[str]]
"""The problems of each run, by its name."""


def check_groups(
    doc: str | None,
    groups: Mapping[str, Callable[[argparse.Namespace], Found]],
    record: Callable[[Found], None],
) -> None:
    """Run the groups that the command line names, or all, print their problems, and exit."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment with the host")
    parser.add_argument("--wheels", type=Path, help="directory with the host's wheels, for contract")
    parser.add_argument("--record", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    parser.add_argument("groups", nargs="*", choices=[*groups, []])
    arguments = parser.parse_args()
    failed = False
    for name in arguments.groups or groups:
        found = groups[name](arguments)
        for run, wrong in found.items():
            line = f"{'FAILED' if wrong else 'ok':7}{run}"
            print(line, *wrong, sep="\n       " if wrong else "", flush=True)
            failed |= bool(wrong)
        if name == "families" and arguments.record:
            record(found)
    sys.exit(failed)
