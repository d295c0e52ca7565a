"""ATOM inside SGLang, without a GPU: `make test-sglang`, with the names of some groups of runs in ARGS.

    families    every family, with ATOM's attention and with SGLang's
    features    fused norms and RoPE, pages, chunked prefill
    quantized   quantized checkpoints
    ranks       tensor parallelism on two ranks
    servers     the HTTP server
    contract    the interfaces of SGLang that the plugin uses, in its wheel

Token ids have to be transformers', from models of ATOM and by the attention of the run, and the prompts of
the second round have to come from the radix cache. `--record` writes the table of docs/use/plugins.md.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atom.plugin.families import LATENT
from tests.helpers.checkpoints.reference import NEW_TOKENS, PROMPTS
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN
from tests.helpers.plugins.host_runs import (
    PAGE,
    STAND_INS,
    Found,
    check_groups,
    run_process,
    save_and_generate,
    write_entry_points,
    wrong_ids,
)
from tests.helpers.plugins.host_table import write_table
from tests.helpers.source import ROOT
from tests.sglang.cases import FAMILIES, FEATURES, HOST, OWN, QUANTIZED, RANKS, SERVERS, Case
from tests.sglang.contract import check_contracts

GROUPS = {
    "families": FAMILIES,
    "features": FEATURES,
    "quantized": QUANTIZED,
    "ranks": RANKS,
    "servers": SERVERS,
}
NATIVE_STAND_INS = ROOT / "tests/sglang/stand_ins"
PROBE = {"sglang.srt.plugins": {"atom_test_probe": "tests.sglang.probe:register"}}


def environment(attention: str, place: Path) -> dict[str, str]:
    """The variables of SGLang's processes, which find ATOM as if it were installed."""
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, NATIVE_STAND_INS, STAND_INS, place))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "ATOM_TEST_PROBE": str(place / "probe.jsonl"),
        "ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION": "0" if attention == OWN else "1",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")} | own


def settings(case: Case, model: Path) -> dict[str, Any]:
    """The arguments of SGLang's Engine."""
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": case.backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "context_length": MAX_MODEL_LEN,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        **case.engine,
    }


def request(case: Case, number: int, model: Path, place: Path) -> dict[str, Any]:
    """The run, for the modules that make it."""
    ranks = case.engine.get("tp_size", 1)
    return {
        "name": case.name,
        "environment": {
            # More ranks than NUMA nodes need it.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
            "ATOM_TEST_PROBE": str(place / f"probe{number}.jsonl"),
            **case.environment,
        },
        "engine": settings(case, model),
        "prompts": PROMPTS,
        "max_tokens": NEW_TOKENS,
        "rounds": 2,
        "server": case.server,
    }


def run_engines(python: str, cases: list[Case], directories: list[Path]) -> list[dict[str, Any]]:
    """The results of cases of one attention, from one process. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_entry_points(place, PROBE)
        runs = [
            request(case, number, directory, place)
            for number, (case, directory) in enumerate(zip(cases, directories, strict=True))
        ]
        results = place / "results.jsonl"
        variables = environment(cases[0].attention, place)
        if cases[0].server:
            found = [_run_server(python, run, variables, results) for run in runs]
        else:
            (place / "runs.json").write_text(json.dumps(runs))
            command = [python, "-m", "tests.sglang.generate", str(place / "runs.json"), str(results)]
            lines = {line["name"]: line for line in run_process(command, variables, results)}
            found = [lines.get(case.name, {}) for case in cases]
        return [
            {"facts": _facts(place / f"probe{number}.jsonl"), **each} for number, each in enumerate(found)
        ]


def _run_server(python: str, run: dict[str, Any], variables: dict[str, str], results: Path) -> dict[str, Any]:
    results.unlink(missing_ok=True)
    path = results.with_name("run.json")
    path.write_text(json.dumps({**run, "results": str(results)}))
    found = run_process(
        [python, "-m", "tests.sglang.serve", str(path)], variables | run["environment"], results
    )
    return found[0] if found else {}


def _facts(probe: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []


def problems(case: Case, expected: list[list[int]], found: dict[str, Any]) -> list[str]:
    """What is wrong with a result."""
    if "ids" not in found:
        return [f"no result ({found.get('error')}); the scheduler was {found['facts']}"]
    wrong = wrong_ids(expected, found["ids"])
    facts: dict[str, set[Any]] = {}
    for line in found["facts"]:
        for name, value in line.items():
            facts.setdefault(name, set()).add(value)
    module = f"atom.plugin.sglang.models.atom_models/workers.models.{case.row.model_type}"
    own = {"atom.plugin.sglang.attention_backend"}
    wanted: dict[str, set[Any]] = {"model": {module}}
    if case.row.model_type not in LATENT:  # whose layers read the pool themselves
        wanted["saves"] = {case.saves}
    wrong += [f"{name}: {facts.get(name)}" for name, value in wanted.items() if facts.get(name) != value]
    backend = facts.get("backend")
    if backend is None or (backend == own) != (case.attention == OWN):
        wrong.append(f"attention by {backend}")
    page = case.engine.get("page_size", 1)
    # Whole pages are cached, and the last token of a prompt is computed anyway.
    if any(len(prompt) > page and not hit for prompt, hit in zip(PROMPTS, found["cached"], strict=True)):
        wrong.append(f"tokens from the radix cache: {found['cached']}")
    return wrong


def run_group(python: str, cases: list[Case]) -> Found:
    """The problems of each case, by its name."""
    found: Found = {}
    for attention in (OWN, HOST):
        chosen = [case for case in cases if case.attention == attention]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as place:
            directories = [Path(place) / str(number) for number in range(len(chosen))]
            expected = [
                save_and_generate(case.row, case.format, directory, case.margin)
                for case, directory in zip(chosen, directories, strict=True)
            ]
            results = run_engines(python, chosen, directories)
            for case, ids, result in zip(chosen, expected, results, strict=True):
                found[case.name] = problems(case, ids, result)
    return found


def _group(cases: list[Case]) -> Callable[[argparse.Namespace], Found]:
    return lambda arguments: run_group(arguments.python, cases)


def main() -> None:
    groups = {name: _group(cases) for name, cases in GROUPS.items()}
    check_groups(
        __doc__,
        {**groups, "contract": lambda arguments: check_contracts(arguments.wheels)},
        lambda found: write_table(PAGE, "SGLang", FAMILIES, found, (OWN, HOST)),
    )


if __name__ == "__main__":
    main()
