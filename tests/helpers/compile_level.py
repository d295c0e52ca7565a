"""python -m tests.helpers.compile_level MODEL LEVEL: tokens of a tiny model, hits of the compile cache."""

import json
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from tests.helpers.core_side import generate
from tests.helpers.teacher_forcing import TinyWorker
from tests.helpers.tiny_models import prompt_of


def main() -> None:
    worker = TinyWorker(Path(sys.argv[1]), level=int(sys.argv[2]))
    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    tokens = generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)
    found = counters["inductor"]
    sys.stdout.write(
        json.dumps(
            {"tokens": tokens, "hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}
        )
    )


if __name__ == "__main__":
    main()
