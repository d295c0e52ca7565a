"""Tokens of a tiny model, and hits of the compile cache.

python -m tests.helpers.engine.compile_level MODEL LEVEL
"""

import json
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from tests.helpers.checkpoints.tiny_models import prompt_of
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker


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
