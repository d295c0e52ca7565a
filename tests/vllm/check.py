"""ATOM inside vLLM, without a GPU: `make test-vllm`, with the names of some groups of runs in ARGS.

    families    every family, with ATOM's attention and with vLLM's
    features    chunked prefill, prefix cache and speculation of vLLM
    quantized   quantized checkpoints
    ranks       tensor and expert parallelism on two ranks
    contract    the interfaces of vLLM that the plugin uses, in the wheels of its other versions

Token ids have to be transformers', from models of ATOM and by the attention of the run. `--record` writes the
table of docs/use/plugins.md.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from tests.helpers.quantized_formats import FORMATS, save_quantized
from tests.helpers.reference import NEW_TOKENS, PROMPTS
from tests.helpers.tiny_models import MAX_MODEL_LEN, build_tiny, hf_greedy
from tests.vllm.cases import FAMILIES, FEATURES, HOST, OWN, QUANTIZED, RANKS, Case
from tests.vllm.contract import check_contracts
from tests.vllm.table import write_table

ROOT = Path(__file__).parents[2]
GROUPS = {"families": FAMILIES, "features": FEATURES, "quantized": QUANTIZED, "ranks": RANKS}
MIN_MARGIN = 1e-3
DEADLINE_S = 1800
"""Limit of all runs of a group together, on a busy machine."""


def prepared(case: Case, directory: Path) -> list[list[int]]:
    """Saves the case's checkpoint; returns transformers' greedy ids, up to a token without a margin."""
    if case.format is None:
        model = build_tiny(case.row)
        model.save_pretrained(directory)
    else:
        format = next(each for each in FORMATS if each.name == case.format)
        model = save_quantized(case.row, format, directory)
    greedy = [hf_greedy(model, prompt, NEW_TOKENS, MIN_MARGIN) for prompt in PROMPTS]
    return [each.ids[:-1] if each.smallest_margin <= MIN_MARGIN else each.ids for each in greedy]


def environment(entry_points: Path) -> dict[str, str]:
    """The variables of vLLM's process, which finds ATOM as if it were installed."""
    path = os.pathsep.join([str(ROOT), str(entry_points)])
    own = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | own


def write_entry_points(directory: Path) -> None:
    """The metadata of an installed ATOM, with the entry points of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / f"atom_serve-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: atom-serve\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_all(python: str, cases: list[Case], directories: list[Path]) -> list[dict[str, Any]]:
    """The results of all cases, from one process of vLLM. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_entry_points(folder)
        runs = [_run(case, directory) for case, directory in zip(cases, directories, strict=True)]
        (folder / "runs.json").write_text(json.dumps(runs))
        results = folder / "results.jsonl"
        command = [python, "-m", "tests.vllm.generate", str(folder / "runs.json"), str(results)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(folder), start_new_session=True)
        try:
            process.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # vLLM's children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return [json.loads(line) for line in results.read_text().splitlines()]


def _run(case: Case, directory: Path) -> dict[str, Any]:
    common = {
        "model": str(directory),
        "max_model_len": MAX_MODEL_LEN,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "dtype": "float32",
        "skip_tokenizer_init": True,
    }
    return {
        "name": case.name,
        "environment": case.environment,
        "prompts": PROMPTS,
        "max_tokens": NEW_TOKENS,
        "rounds": case.rounds,
        "llm": {**common, **case.llm},
    }


def problems(case: Case, expected: list[list[int]], found: dict[str, Any]) -> list[str]:
    """What is wrong with a result."""
    if "error" in found:
        return [found["error"]]
    wrong = []
    for number, ids in enumerate(found["ids"]):
        if any(own[: len(wanted)] != wanted for own, wanted in zip(ids, expected, strict=True)):
            wrong.append(f"round {number}: {ids} instead of {expected}")
    if not found["model"].endswith(f"workers.models.{case.row.model_type}"):
        wrong.append(f"the model is {found['model']}, not ATOM's")
    if ("CUSTOM" in found["backends"]) != (case.attention == OWN):
        wrong.append(f"attention by {found['backends']}")
    if case.proof and not max(found[case.proof]):
        wrong.append(f"{case.proof}: {found[case.proof]}")
    return wrong


def run_group(python: str, cases: list[Case]) -> dict[str, list[str]]:
    """The problems of each case, by its name."""
    with tempfile.TemporaryDirectory() as place:
        directories = [Path(place) / str(number) for number in range(len(cases))]
        expected = [prepared(case, directory) for case, directory in zip(cases, directories, strict=True)]
        results = run_all(python, cases, directories)
        return {
            case.name: problems(case, ids, found)
            for case, ids, found in zip(cases, expected, results, strict=True)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment with vLLM")
    parser.add_argument("--wheels", type=Path, help="directory with vLLM's wheels, for contract")
    parser.add_argument("--record", action="store_true", help="write the table of docs/use/plugins.md")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, "contract", []])
    arguments = parser.parse_args()
    names = arguments.groups or [*GROUPS, "contract"]
    failed = False
    for name in names:
        if name == "contract":
            found = check_contracts(arguments.wheels)
        else:
            found = run_group(arguments.python, GROUPS[name])
        for case, wrong in found.items():
            print(
                f"{'FAILED' if wrong else 'ok':7}{case}", *wrong, sep="\n       " if wrong else "", flush=True
            )
            failed |= bool(wrong)
        if name == "families" and arguments.record:
            write_table(ROOT / "docs/use/plugins.md", FAMILIES, found, (OWN, HOST))
    sys.exit(failed)


if __name__ == "__main__":
    main()
