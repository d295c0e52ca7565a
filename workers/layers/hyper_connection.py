"""Hyper-connections: N residual streams that are mixed around each block; see the ops of that name.

T tokens, N streams, D features of one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom_ops import HyperWeights, hyper_collapse, hyper_expand, hyper_head
from parallel.communicator import Communicator
from workers.layers.context import BuildContext
from workers.layers.weighted import CheckpointTensor, ShardRange, ShardSpec, WeightedLayer


@dataclass(frozen=True, kw_only=True)
class HyperArgs:
    """The parameters of all hyper-connections of a model."""

    hidden_size: int
    streams: int
    iterations: int
    """Sinkhorn's iterations."""
    norm_eps: float
    eps: float


class _Mappings(WeightedLayer):
    """The learned mappings, float32 and the same on every rank."""

    projection: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    def __init__(self, args: HyperArgs, names: tuple[str, str, str], head: bool, build: BuildContext):
        """`names` are those of projection, base and scale in the checkpoint, as of a `CheckpointTensor`."""
        super().__init__()
        self._args = args
        self._iterations = 0 if head else args.iterations
        rows = args.streams if head else args.streams * (2 + args.streams)
        shapes = ((rows, args.streams * args.hidden_size), (rows,), (1 if head else 3,))
        for own, name, shape in zip(("projection", "base", "scale"), names, shapes, strict=True):
            tensor = CheckpointTensor(name, (shape,))
            self.add_weight(
                own, [ShardSpec(shape, 0, ShardRange.whole(shape[0]), tensor)], build, torch.float32
            )

    def weights(self) -> HyperWeights:
        args = self._args
        return HyperWeights(self.projection, self.base, self.scale, args.norm_eps, args.eps, self._iterations)


class HyperConnection(_Mappings):
    """The streams around one block. Names of its tensors, in the module around it, begin with `prefix`."""

    def __init__(self, args: HyperArgs, prefix: str, build: BuildContext):
        super().__init__(args, (f".{prefix}_fn", f".{prefix}_base", f".{prefix}_scale"), False, build)

    def forward(
        self, streams_TND: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor], tp: Communicator
    ) -> torch.Tensor:
        """The streams after `block`, which maps [T, D] to a partial sum over the ranks of `tp`."""
        x_TD, post_TN, mix_TNN = hyper_collapse(streams_TND, self.weights())
        return hyper_expand(tp.all_reduce(block(x_TD)), streams_TND, post_TN, mix_TNN)


class HyperHead(_Mappings):
    """The sum of the streams after the last layer. Names of its tensors begin with `prefix`."""

    def __init__(self, args: HyperArgs, prefix: str, build: BuildContext):
        super().__init__(args, (f"{prefix}_fn", f"{prefix}_base", f"{prefix}_scale"), True, build)

    def forward(self, streams_TND: torch.Tensor) -> torch.Tensor:
        return hyper_head(streams_TND, self.weights())
