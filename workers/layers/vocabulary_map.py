"""The vocabulary of a drafter that drafts some of the model's tokens alone."""

import torch

from workers.layers.context import BuildContext
from workers.layers.quantization.scheme import StoredTensor
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer


def _no_difference(d2t: torch.Tensor, std: float, generator: torch.Generator) -> None:
    d2t.zero_()


class VocabularyMap(WeightedLayer):
    """d2t: how much larger the model's id is than the drafter's id of the same token."""

    d2t: torch.Tensor

    def __init__(self, draft_vocab_size: int, build: BuildContext):
        super().__init__()
        stored = StoredTensor("", (1, 1), (torch.int64, torch.int32), _no_difference)
        shard = ShardSpec((draft_vocab_size,), 0, ShardRange.whole(draft_vocab_size), stored=stored)
        self.add_weight("d2t", [shard], build, torch.int64)

    def forward(self, ids_R: torch.Tensor) -> torch.Tensor:
        return ids_R + self.d2t.index_select(0, ids_R)
