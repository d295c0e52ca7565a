"""Runs of SGLang's Engine, one after the other: settings from a file, token ids to another.

    python -m tests.sglang.generate RUNS.json RESULTS.jsonl

A run has a `name`, `environment` variables, the `prompts` as ids, `max_tokens`, the number of `rounds`, and
arguments for the `engine`. A line of the results has the name, and `ids` (by round and prompt) and `cached`
(tokens of each prompt of the last round that came from the radix cache), or `error`.
"""

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text())
    results = sys.argv[2]
    # Programmatic starts have no arguments of their own.
    del sys.argv[1:]
    import_once()
    with open(results, "a", buffering=1) as lines:
        for run in runs:
            if not (child := os.fork()):
                write_result(run, lines)
            _, status = os.waitpid(child, 0)
            if status:
                lines.write(json.dumps({"name": run["name"], "error": f"ended with status {status}"}) + "\n")


def import_once() -> None:
    """Import SGLang and its plugins for all runs: it takes a minute in each of an engine's processes.

    So they are forked here, where SGLang would start them anew, as its servers do.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force)


def write_result(run: dict[str, Any], results: TextIO) -> NoReturn:
    """Run in this process, and end it."""
    os.environ |= run["environment"]
    try:
        found = generate(run)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    results.write(json.dumps({"name": run["name"], **found}) + "\n")
    sys.stdout.flush()
    os._exit(0)


def generate(run: dict[str, Any]) -> dict[str, Any]:
    import sglang

    engine = sglang.Engine(**run["engine"])
    sampling = {"max_new_tokens": run["max_tokens"], "temperature": 0, "ignore_eos": True}
    rounds = [
        engine.generate(input_ids=run["prompts"], sampling_params=sampling) for _ in range(run["rounds"])
    ]
    engine.shutdown()
    return {
        "ids": [[output["output_ids"] for output in outputs] for outputs in rounds],
        "cached": [output["meta_info"]["cached_tokens"] for output in rounds[-1]],
    }


if __name__ == "__main__":
    main()
