"""Arguments of building a model and of one forward pass, besides its configuration and the tokens.

Both are passed as arguments; nothing in the workers reads a global.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from atom_ops import AttentionPlan, KVLayer, LatentLayer, StateLayer, StatePlan, TopKIndices
from parallel.communicator import Communicator
from parallel.expert import ExpertDispatch, LocalDispatch
from workers.layers.attention.rotation import Rotation
from workers.layers.moe.second_stream import SecondStream
from workers.layers.quantization.config import QuantizationConfig


def path_on_disk(path: str, renamed: Mapping[str, str]) -> str:
    """The path of a module in the checkpoint, where `renamed` is as `CausalLM.renamed_on_disk`."""
    names = path.split(".")
    for at in range(len(names) - 1):
        pair = renamed.get(f"{names[at]}.{names[at + 1]}")
        if pair is not None:
            names[at : at + 2] = pair.split(".")
    return ".".join(renamed.get(name, name) for name in names)


CacheLayer = KVLayer | LatentLayer | StateLayer | torch.Tensor | Any
"""The cache of one layer; other types belong to attention backends with layouts of their own."""


@dataclass(frozen=True)
class BuildContext:
    """Dtype, device and tensor-parallel group that the layers of this rank are built for."""

    dtype: torch.dtype
    device: torch.device
    tp: Communicator
    max_positions: int
    """Length of the longest sequence: the size of the RoPE tables."""
    dcp: Communicator = field(default_factory=Communicator)
    """Ranks of the tensor-parallel group that split the latent KV cache by tokens."""
    block_size: int = 16
    """Tokens of a KV block on a rank."""
    kv_dtype: torch.dtype | None = None
    """Dtype of cached keys and values; None: `dtype`."""
    dispatch: ExpertDispatch = field(default_factory=LocalDispatch)
    """How tokens reach the experts of MoE layers."""
    redundant_experts: int | None = None
    """Replicas of experts besides one of each; None: experts have no slots and stay where they are."""
    second_stream: SecondStream | None = None
    """Where shared experts run alongside the routed ones; None: after them."""
    overlap_tokens: int = 0
    """Tokens of the smallest step whose all-reduces overlap GEMMs; 0: in no step."""
    mtp: bool = False
    """Whether to build the first layer for multi-token prediction."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    renamed: Mapping[str, str] = field(default_factory=dict)
    """As `CausalLM.renamed_on_disk`."""
    prefix: str = ""
    """Path in the checkpoint of the module that is built."""
    separate_tables: bool = False
    """Whether each attention layer is a KV group of its own, because it may have a block table of its own."""

    def at(self, path: str) -> "BuildContext":
        """The context of the module at `path` within this one."""
        whole = ".".join(filter(None, [self.prefix, path]))
        return replace(self, prefix=path_on_disk(whole, self.renamed))


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The inputs of one KV group's layers in a step: cache slots of its tokens, and the attention plan."""

    slots_T: torch.Tensor
    """int64: block * block_size + offset of each token."""
    plan: AttentionPlan


@dataclass(slots=True)
class SharedTopK:
    """The tokens that sparse attention reads: written by layers with an indexer, read by those without."""

    tokens: TopKIndices | None = None
    """None: all tokens up to the current one."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The M tokens of a step that stand for parts of images, and what a vision tower made of them."""

    tokens_M: torch.Tensor
    """int64: index among the step's tokens."""
    features_MLD: torch.Tensor
    """Level 0 replaces the token's embedding; level l is added to the output of decoder layer l - 1."""


Mixing = Callable[..., torch.Tensor]
"""What of a token mixer depends on the step's plans: (context, rotation, *tensors of the step) -> [T, …]."""


class Splitter(Protocol):
    """Captures a forward pass in pieces: graphs of what lies between its token mixers."""

    def split(
        self, mix: Mixing, ctx: "ForwardContext", rotation: Rotation, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """End a piece, compute `mix` outside of graphs, begin the next piece; the result of `mix`."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """KV caches and attention metadata of one step."""

    kv_layers: Sequence[CacheLayer]
    """Caches by layer index."""
    groups: Sequence[GroupContext | StatePlan]
    """By KV group; a `StatePlan` for groups of recurrent layers."""
    topk_indices: SharedTopK = field(default_factory=SharedTopK)
    """Top-k indices of the latest layer with an indexer."""
    splitter: Splitter | None = None
    """Set while the pass is captured in pieces."""
    images: ImageTokens | None = None
    """Set in an eager step with tokens of images."""

    def mix(self, compute: Mixing, rotation: Rotation, *tensors: torch.Tensor) -> torch.Tensor:
        """`compute(self, rotation, *tensors)`; outside of the graphs if the pass is captured in pieces.

        Everything that reads the plans or caches of the context has to be computed in such a call.
        """
        if self.splitter is None:
            return compute(self, rotation, *tensors)
        return self.splitter.split(compute, self, rotation, tensors)
