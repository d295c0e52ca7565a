"""ATOM inside vLLM, without a GPU: `make test-vllm`, with the names of some groups of runs in ARGS.

    families    every family, with ATOM's attention and with vLLM's
    features    chunked prefill, prefix cache and speculation of vLLM
    quantized   quantized checkpoints
    ranks       tensor and expert parallelism on two ranks
    larger      a model for images, which stays vLLM's own
    evaluation  lm-eval's metrics of a small real model in `vllm serve`, and vLLM's without ATOM
    command     the published command line in `vllm serve`: served, or refused by name
    contract    the interfaces of vLLM that the plugin uses, in the wheels of its other versions

Token ids have to be transformers', from models of ATOM and by the attention of the run. `--record` writes the
table of docs/use/plugins.md.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints.reference import NEW_TOKENS, PROMPTS
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN
from tests.helpers.plugins.host_runs import (
    PAGE,
    Found,
    check_groups,
    run_process,
    save_and_generate,
    write_entry_points,
    wrong_ids,
)
from tests.helpers.plugins.host_table import write_table
from tests.helpers.source import ROOT
from tests.vllm.cases import FAMILIES, FEATURES, HOST, OWN, QUANTIZED, RANKS, Case
from tests.vllm.command_line import check_command_line
from tests.vllm.contract import check_contracts
from tests.vllm.evaluation import check_evaluation
from tests.vllm.larger_model import check_larger_model

GROUPS = {"families": FAMILIES, "features": FEATURES, "quantized": QUANTIZED, "ranks": RANKS}


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


def run_all(python: str, cases: list[Case], directories: list[Path]) -> list[dict[str, Any]]:
    """The results of all cases, from one process of vLLM. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_entry_points(folder)
        runs = [_run(case, directory) for case, directory in zip(cases, directories, strict=True)]
        (folder / "runs.json").write_text(json.dumps(runs))
        results = folder / "results.jsonl"
        command = [python, "-m", "tests.vllm.generate", str(folder / "runs.json"), str(results)]
        return run_process(command, environment(folder), results)


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
    wrong = wrong_ids(expected, found["ids"])
    if not found["model"].endswith(f"workers.models.{case.row.model_type}"):
        wrong.append(f"the model is {found['model']}, not ATOM's")
    if ("CUSTOM" in found["backends"]) != (case.attention == OWN):
        wrong.append(f"attention by {found['backends']}")
    if case.proof and not max(found[case.proof]):
        wrong.append(f"{case.proof}: {found[case.proof]}")
    return wrong


def run_group(python: str, cases: list[Case]) -> Found:
    """The problems of each case, by its name."""
    with tempfile.TemporaryDirectory() as place:
        directories = [Path(place) / str(number) for number in range(len(cases))]
        expected = [
            save_and_generate(case.row, case.format, directory)
            for case, directory in zip(cases, directories, strict=True)
        ]
        results = run_all(python, cases, directories)
        return {
            case.name: problems(case, ids, found)
            for case, ids, found in zip(cases, expected, results, strict=True)
        }


def _installed(
    check: Callable[[str, Mapping[str, str], Path], Found],
) -> Callable[[argparse.Namespace], Found]:
    """A group that runs vLLM with ATOM in a directory on its path."""

    def group(arguments: argparse.Namespace) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            write_entry_points(place)
            return check(arguments.python, environment(place), place)

    return group


def _group(cases: list[Case]) -> Callable[[argparse.Namespace], Found]:
    return lambda arguments: run_group(arguments.python, cases)


def main() -> None:
    groups = {name: _group(cases) for name, cases in GROUPS.items()}
    check_groups(
        __doc__,
        {
            **groups,
            "larger": _installed(check_larger_model),
            "evaluation": _installed(check_evaluation),
            "command": _installed(check_command_line),
            "contract": lambda arguments: check_contracts(arguments.wheels),
        },
        lambda found: write_table(PAGE, "vLLM", FAMILIES, found, (OWN, HOST)),
    )


if __name__ == "__main__":
    main()
