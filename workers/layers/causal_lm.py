"""What every language model offers to the runner, the loader and the KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from workers.layers.cache_groups import CacheGroup
from workers.layers.context import BuildContext, ForwardContext


class CausalLM(nn.Module, ABC):
    """Base of the classes in `ARCHITECTURES` of a model file.

    T tokens, R rows that draw, D hidden, V vocabulary.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]]
    """Fused module -> the modules on disk that are stacked into it, in this order."""
    renamed_on_disk: ClassVar[Mapping[str, str]] = {}
    """Module -> its name on disk, where a family calls by another name what others share."""
    kv_groups: list[CacheGroup]
    """Every attention layer belongs to one of them."""
    unused_on_disk: tuple[str, ...] = ()
    """Patterns of tensors that a sound checkpoint may hold though the model has no use for them."""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        """`config` is config.json; raises KeyError or ValueError for what it lacks or asks for."""
        super().__init__()

    @abstractmethod
    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Final hidden states [T, D]."""

    @abstractmethod
    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] over the whole vocabulary, equal on every rank."""
