"""Token embedding and LM head, sharded over the ranks by vocabulary.

T tokens, R sampling rows, D hidden, V vocabulary.
"""

import torch

from atom_ops import (
    SamplingBatch,
    Weight,
    embedding,
    linear,
    linear_argmax,
    merge_argmax,
    sample,
    shard_argmax,
)
from parallel.sharding import split
from workers.layers.context import BuildContext
from workers.layers.linear import Linear, tp_range
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import ShardSpec, WeightedLayer


def rounded(scale: float, dtype: torch.dtype) -> float:
    """A scale of embeddings as it is in `dtype`; on the host, also for a model on the meta device."""
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))


def _add_vocabulary(layer: WeightedLayer, shard: ShardSpec, build: BuildContext) -> bool:
    """Add the matrix of a vocabulary; returns whether it is quantized."""
    scheme = build.quantization.vocabulary(build.prefix)
    if scheme is PLAIN:
        layer.add_weight("weight", [shard], build)
    else:
        layer.add_matrix("weight", scheme, [shard], build)
    return scheme is not PLAIN


class VocabEmbedding(WeightedLayer):
    """Maps token ids to vectors; ids of other ranks contribute zeros to the all-reduce.

    A quantized matrix is dequantized when it is loaded.
    """

    weight: torch.Tensor

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext):
        super().__init__()
        self._tp = build.tp
        self._kept = tp_range(vocab_size, build)
        self.dequantizes = _add_vocabulary(self, ShardSpec((vocab_size, hidden_size), 0, self._kept), build)
        self._for_head: Weight | None = None

    def process_weights_after_loading(self) -> None:
        weight = self.loaded("weight")
        if not isinstance(weight, torch.Tensor):
            self._for_head = weight
            self.set_weight("weight", self.dequantized(weight))

    def take_weight(self) -> Weight:
        """The weight as it was loaded, for a tied LM head."""
        weight = self._for_head
        self._for_head = None
        return self.weight if weight is None else weight

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(embedding(ids_T, self.weight, self._kept.start))


class LMHead(Linear):
    """Maps hidden states to float32 logits over the whole vocabulary, the same on every rank.

    With `tied_to` it uses that embedding's weight and loads none. With a `soft_cap` logits x become
    soft_cap * tanh(x / soft_cap).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        build: BuildContext,
        tied_to: VocabEmbedding | None,
        soft_cap: float = 0.0,
    ):
        super().__init__()
        self._soft_cap = soft_cap
        self._tp = build.tp
        self._first, _ = split(vocab_size, build.tp.size, build.tp.rank)
        self._sizes = [split(vocab_size, build.tp.size, rank)[1] for rank in range(build.tp.size)]
        if tied_to is None:
            kept = tp_range(vocab_size, build)
            _add_vocabulary(self, ShardSpec((vocab_size, hidden_size), 0, kept), build)
        else:
            self.register_buffer("weight", None)
            self._dtype = build.dtype
        self._tied_weight = None if tied_to is None else tied_to.take_weight

    def process_weights_after_loading(self) -> None:
        if self._tied_weight is None:
            super().process_weights_after_loading()
        else:
            self.set_weight("weight", self._packed(self._tied_weight()))

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._tp.all_gather_last_dim(self._shard(hidden_RD), self._sizes)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """The ids that the op `sample` returns for the logits; greedy rows need no gathered logits."""
        on_cpu = hidden_RD.device.type == "cpu"
        if not settings.any_random and self._tp.size == 1 and on_cpu and not self._soft_cap:
            # On a GPU `sample` reads logits faster than torch finds the largest. A cap makes some equal.
            return linear_argmax(hidden_RD, self.weight)
        if settings.any_random or self._tp.size == 1:
            # Always of the same logits: a row's token must not depend on the settings of other rows.
            return sample(self(hidden_RD), settings, positions_R)
        keys_1R = shard_argmax(self._shard(hidden_RD), self._first)[None]
        return merge_argmax(self._tp.all_gather_rows(keys_1R, [1] * self._tp.size))

    def _shard(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary."""
        # float32, because rounding logits to 16 bits makes different tokens tie.
        logits_RV = linear(hidden_RD, self.weight, None, torch.float32)
        if self._soft_cap:
            logits_RV = logits_RV.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits_RV
