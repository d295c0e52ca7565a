"""The interface of every language model to the runner, the weight loader and the KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from atom_ops import SamplingBatch, sample
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.context import BuildContext, ForwardContext
from workers.vision.tower import VisionTower

OTHER_MODALITIES = ("*vision_tower.*", "*vision_model.*", "*multi_modal_projector.*")
"""Patterns of the tensors of multimodal checkpoints that do not belong to the language model."""


class WeightedModel(nn.Module):
    """A model as the weight loader and the KV cache see it."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]]
    """Fused module -> the checkpoint's modules that are stacked into it, in this order."""
    renamed_on_disk: ClassVar[Mapping[str, str]] = {}
    """Module name -> its name in the checkpoint, where the two differ.

    A name that differs within some modules only stands with that of its parent, a dot between them.
    """
    beginnings_on_disk: ClassVar[Mapping[str, str]] = {}
    """Beginnings of tensors' names in the family's own checkpoints, and what transformers' have instead."""
    kv_groups: list[CacheGroup]
    """Every layer that caches something belongs to exactly one."""
    unused_on_disk: tuple[str, ...] = ()
    """Patterns of tensors that a checkpoint may hold and that are not loaded."""


class CausalLM(WeightedModel, ABC):
    """Base of the classes in `ARCHITECTURES` of a model file.

    T tokens, R sampling rows, D hidden, V vocabulary.
    """

    overlap_tokens: int = 0
    """Tokens of the smallest step whose all-reduces overlap GEMMs, where ranks can; 0: in no step."""
    draft: "DraftModel | None" = None
    """A model that drafts for this one; None without --draft-model."""

    @property
    def tower(self) -> VisionTower | None:
        """None for a model that reads text alone."""
        return None

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        """`config` is config.json. Raises KeyError (missing field) or ValueError (unsupported)."""
        super().__init__()

    @abstractmethod
    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Final hidden states [T, D]."""

    @abstractmethod
    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] over the whole vocabulary, equal on every rank."""

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Ids, int64 [R]: those that the op `sample` returns for the logits."""
        return sample(self.compute_logits(hidden_RD), settings, positions_R)

    @property
    def with_draft(self) -> list[WeightedModel]:
        """The models of a rank: this one, and the one that drafts for it."""
        return [self] if self.draft is None else [self, self.draft.model]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts for another one, whose KV groups end with its own."""

    model: WeightedModel
    directory: str
    """The directory of its checkpoint."""
    first_group: int
    """Number of its first KV group, among those of the other model."""
    first_layer: int
    """Number of its first layer in these groups."""
