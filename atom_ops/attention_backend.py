"""Attention backends: each owns the layout of its KV cache, its metadata of a step, and its kernels.

Providers of an op share the layout of its arguments, so another one can run each call. The layout of a cache
outlives the call: a layer's backend is therefore bound once, when the model is built, and then asked for

    bytes_per_block, allocate     the cache: its size for the engine core, its tensors
    plan                          the metadata of a step, once for all layers that share it
    attend                        the attention of a layer

A backend is one file that calls `register_attention_backend`. Names are ordered with those of the ops'
providers (`backend.resolve`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.fused_attention import attend_projection
from atom_ops.ops.attention.kv_cache import KVLayer, kv_bytes_per_block, make_kv_layer
from atom_ops.ops.attention.qkv import HeadNorms


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What the attention layers of one KV group need; known at load and fixed. Heads are this rank's."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """Sliding window in tokens; 0: none."""
    sinks: bool
    """Whether the layers have attention sinks."""
    soft_cap: bool = False
    """Whether the layers cap their scores."""
    chunked: bool = False
    """Whether the window begins at its last multiple: see `AttentionRule`."""
    sees_ahead: bool = False
    """Whether plans of these layers may have `ahead_T`."""


class AttentionBackend(ABC):
    """Paged attention with a KV layout of its own.

    Slot s is offset s % block_size of block s // block_size, whatever the layout.
    """

    name: str
    needs: str
    """What `supported` requires, as text after "it needs "."""
    batch_invariant: bool = False
    """Whether a row's bits depend on that row alone if the plan sets `split_tokens`."""

    @abstractmethod
    def supported(self, device: torch.device) -> bool:
        """Whether it runs on `device`; asked when a worker starts."""

    @abstractmethod
    def supports(self, config: AttentionConfig) -> bool:
        """Whether it can run every step of these layers; asked once, when the model is built."""

    @abstractmethod
    def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block of one layer takes; `dtype` is that of the stored keys and values."""

    @abstractmethod
    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """The zeroed cache of one layer, which only this backend reads."""

    @abstractmethod
    def plan(self, plan: AttentionPlan) -> Any:
        """The metadata that `attend` gets, from that of the step; computed once for all layers of a group.

        In a captured step this is captured too: it has no host rows, and what it launches depends only on
        the plan's numbers, which bound its tensors.
        """

    @abstractmethod
    def attend(
        self,
        qkv_TO: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        cache: Any,
        slots_T: Tensor,
        norms: HeadNorms | None,
        plan: Any,
        rule: AttentionRule,
    ) -> Tensor:
        """As the op `attend_projection`: writes the tokens' keys and values, returns attention [T, H, E].

        Padding tokens have slot -1 and write nothing; rows without queries are skipped.
        """


class InterleavedKV(AttentionBackend):
    """Keys and values side by side in one tensor (`KVLayer`), attention by the ops: runs everything."""

    name = "interleaved_kv"
    needs = "nothing"
    batch_invariant = True

    def supported(self, device: torch.device) -> bool:
        return True

    def supports(self, config: AttentionConfig) -> bool:
        return True

    def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return kv_bytes_per_block(block_size, kv_heads, head_dim, dtype)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVLayer:
        return make_kv_layer(num_blocks, block_size, kv_heads, head_dim, dtype, device)

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        return plan

    @property
    def attend(self) -> Any:  # the op itself: one call less for every layer of every step
        return attend_projection


INTERLEAVED_KV = InterleavedKV()

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {INTERLEAVED_KV.name: INTERLEAVED_KV}
_order: list[AttentionBackend] = [INTERLEAVED_KV]


def register_attention_backend(backend: AttentionBackend) -> None:
    """Add a backend; `backend.resolve` orders it by its name. Raises ValueError for a duplicate name."""
    if backend.name in ATTENTION_BACKENDS:
        raise ValueError(f"there is already an attention backend {backend.name}")
    ATTENTION_BACKENDS[backend.name] = backend


def use_attention_backends(names: Sequence[str], device: torch.device, batch_invariant: bool) -> None:
    """Set the order of the backends that run on `device`. `InterleavedKV` is always last."""
    known = [ATTENTION_BACKENDS[name] for name in names if name in ATTENTION_BACKENDS]
    _order[:] = [
        each
        for each in known
        if each is not INTERLEAVED_KV
        and each.supported(device)
        and (each.batch_invariant or not batch_invariant)
    ]
    _order.append(INTERLEAVED_KV)


def attention_backend(config: AttentionConfig) -> AttentionBackend:
    """The first backend of the resolved order that supports these layers."""
    return next(each for each in _order if each.supports(config))
