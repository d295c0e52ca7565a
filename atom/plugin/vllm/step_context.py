"""vLLM's metadata of a step as the forward context of ATOM's layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from atom.plugin.vllm.host_config import index_name, layer_name
from atom.plugin.vllm.own_attention import CachedLayer, StepMetadata
from atom_ops import IndexKeys, LatentLayer, empty_attention
from workers.batch.step_padding import pad_groups
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import LatentGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext
from workers.memory.kv_cache import allocate_kv


class OwnAttentionContext:
    """Makes the layers whose caches vLLM allocates, and the forward context of each step."""

    def __init__(self, model: CausalLM, vllm_config: Any, device: torch.device):
        self._groups = [group for group in model.kv_groups if isinstance(group, KVGroup | LatentGroup)]
        assert len(self._groups) == len(model.kv_groups), "families with other caches are not registered"
        self._device = device
        self._dtype = vllm_config.model_config.dtype
        made: dict[int, CachedLayer] = {}
        for group in self._groups:
            made |= {layer: CachedLayer(group, layer_name(layer), vllm_config) for layer in group.layers}
        self._layers = [made[layer] for layer in sorted(made)]
        self._index = _index_layers(self._groups, vllm_config)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers that vLLM knows, which have to be part of the module tree that it sees."""
        return [*self._layers, *self._index.values()]

    def step(self, tokens: int) -> ForwardContext:
        """The context of the current step of `tokens` tokens, padding included."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self._without_cache(tokens)
        if not isinstance(metadata, Mapping):
            raise ValueError("ATOM's attention in vLLM does not run a step as several micro-batches")
        steps = [self._common(metadata, group) for group in self._groups]
        sizes = {
            layer: step.block_size
            for group, step in zip(self._groups, steps, strict=True)
            for layer in group.layers
        }
        caches = [self._cache(layer, sizes[layer]) for layer in range(len(self._layers))]
        return ForwardContext(caches, _padded([step.group for step in steps], tokens))

    def _cache(self, layer: int, block_size: int) -> CacheLayer:
        cache = self._layers[layer].cache(block_size)
        if layer not in self._index:
            return cache
        keys = self._index[layer].cache(block_size)
        assert isinstance(cache, LatentLayer) and isinstance(keys, LatentLayer)
        return replace(cache, index=IndexKeys(keys.rows))

    def _common(self, metadata: Mapping[str, StepMetadata], group: KVGroup | LatentGroup) -> StepMetadata:
        """What vLLM says of layers that read one block table."""
        first, *others = (metadata[layer_name(layer)] for layer in group.layers)
        indexed = group.indexed if isinstance(group, LatentGroup) else ()
        keys = (metadata[index_name(layer)] for layer in indexed)
        if any(other is not first for other in others) or not all(_same_table(first, each) for each in keys):
            raise ValueError(
                f"vLLM gives layers {list(group.layers)} several block tables, and they read one"
            )
        return first

    def _without_cache(self, tokens: int) -> ForwardContext:
        """A step that writes nothing, for the measurement of memory before there is a cache."""
        no_slots = torch.empty(0, dtype=torch.int64, device=self._device)
        nothing = GroupContext(no_slots, empty_attention(self._device))
        blocks = [1] * len(self._groups)
        scratch: list[CacheLayer] = allocate_kv([*self._groups], blocks, 1, self._dtype, self._device)
        return ForwardContext(scratch, pad_groups([nothing] * len(self._groups), tokens, 1))


def _index_layers(groups: Sequence[Any], vllm_config: Any) -> dict[int, CachedLayer]:
    """The layers with index keys, which are to vLLM layers of their own."""
    made: dict[int, CachedLayer] = {}
    for group in groups:
        if isinstance(group, LatentGroup) and group.indexed:
            keys = LatentGroup(group.indexed, group.index_width, 0)
            made |= {layer: CachedLayer(keys, index_name(layer), vllm_config) for layer in group.indexed}
    return made


def _same_table(one: StepMetadata, other: StepMetadata) -> bool:
    """Whether a token has the same slot by both: vLLM plans layers of each size on their own."""
    tables = (each.group.plan.block_table_RW for each in (one, other))
    return one.block_size == other.block_size and len({table.data_ptr() for table in tables}) == 1


def _padded(groups: Sequence[GroupContext], tokens: int) -> Sequence[Any]:
    if all(group.plan.num_tokens == tokens for group in groups):
        return groups
    made = {id(group): pad_groups([group], tokens, len(group.plan.context_lens_R))[0] for group in groups}
    return [made[id(group)] for group in groups]
