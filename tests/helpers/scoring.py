"""Scores of sequences by transformers in float32: ids as JSON in, (log probability, is best) out."""

import json
import sys

from tests.helpers.smollm2 import in_transformers


def _print_scores(sequences: list[list[int]]) -> None:
    import torch

    model = in_transformers()
    rows = []
    for ids in sequences:
        with torch.inference_mode():
            values = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        best = values.argmax(-1).tolist()
        rows.append([(float(values[i - 1, ids[i]]), best[i - 1] == ids[i]) for i in range(1, len(ids))])
    print(json.dumps(rows))


if __name__ == "__main__":
    _print_scores(json.load(sys.stdin))
