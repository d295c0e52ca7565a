"""Searches seeds and scales with which the outputs of a tiny model are distinct enough to be compared.

python -m tests.models.find_seed NAME [--count 3] [--scales 1.5 1.2 2.0] [--seeds 200]
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from tests.helpers.checkpoints.reference import problems_of
from tests.helpers.checkpoints.tiny_models import TINY_MODELS, Tiny, tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[model.name for model in TINY_MODELS])
    parser.add_argument("--count", type=int, default=3, help="number of results")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.5, 1.2, 2.0, 1.0, 2.5])
    parser.add_argument("--seeds", type=int, default=200, help="seeds to try with each scale")
    args = parser.parse_args()
    found = 0
    for model in candidates(tiny(args.name), args.scales, args.seeds):
        if not problems_of(model):
            print(f"seed={model.seed}, scale={model.scale}", flush=True)
            found += 1
        if found == args.count:
            return
    raise SystemExit(f"{found} of {args.count} found: try more --seeds or other --scales")


def candidates(model: Tiny, scales: list[float], seeds: int) -> Iterator[Tiny]:
    """The row unchanged, then every other seed with the first scale, then with the second, …"""
    yield model
    for scale in scales:
        for seed in range(1, seeds + 1):
            if (other := replace(model, seed=seed, scale=scale)) != model:
                yield other


if __name__ == "__main__":
    main()
