"""One run of SGLang: settings from a file, token ids to the file that it names.

    python -m tests.sglang.generate RUN.json

A run has the `prompts` as ids, `max_tokens`, the number of `rounds`, and arguments for the `engine`. The
result has `ids` (by round and prompt) and `cached` (tokens of each prompt of the last round that came from
the radix cache).
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    run = json.loads(Path(sys.argv[1]).read_text())
    # Programmatic starts have no arguments of their own.
    del sys.argv[1:]
    Path(run["results"]).write_text(json.dumps(generate(run)))


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
