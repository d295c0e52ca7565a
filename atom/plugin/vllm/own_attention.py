"""Attention by ATOM on a KV cache that vLLM allocates: the backend CUSTOM, and the layers of ATOM's models.

A layer tells vLLM the size of its cache and gets it. Once a step, the builder turns vLLM's metadata into the
plan that all layers of a KV group share.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from atom.plugin.vllm.kv_layout import contiguous_layouts, kv_layer, kv_spec, latent_layer, packed_heads
from atom_ops import AttentionPlan, AttentionRule, KVLayer, LatentLayer, paged_attention, write_kv
from atom_ops.ops.attention.attention_plan import HostRows
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import LatentGroup
from workers.layers.context import GroupContext

_PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class StepMetadata(AttentionMetadata):
    """What the layers of one KV group of vLLM share in a step."""

    group: GroupContext
    block_size: int
    """Tokens of a block of the layers' caches."""


class PlanBuilder(AttentionMetadataBuilder):
    """Makes ATOM's attention plan from vLLM's metadata of a step.

    vLLM captures steps in which every row decodes. Launches of the others depend on the lengths of prompts.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self._decode_query_len = 1 + drafts
        self._longest = vllm_config.model_config.max_model_len + drafts

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        """The plan of the step's rows; it is always built fast, and rows need no common prefix."""
        step = common_attn_metadata
        rows = step.num_reqs
        starts = step.query_start_loc_cpu[: rows + 1].numpy()
        query_lens = np.diff(starts).astype(np.int32)
        table_RW = step.block_table_tensor[:rows]
        contexts_R = step.seq_lens[:rows].int()
        if contexts_R.device.type != "cpu" and (query_lens == self._decode_query_len).all():
            # Its kernels are those of a captured step: vLLM warms a graph up by such a step.
            return self._metadata(step, self._decodes(step, contexts_R))
        plan = AttentionPlan(
            block_table_RW=table_RW,
            context_lens_R=contexts_R,
            query_starts_R1=step.query_start_loc[: rows + 1],
            num_tokens=step.num_actual_tokens,
            min_query_len=int(query_lens[query_lens > 0].min(initial=step.max_query_len)),
            max_query_len=int(step.max_query_len),
            max_context_len=int(step.max_seq_len),
            host=_host_rows(step, query_lens, contexts_R, table_RW),
            decode_query_len=self._decode_query_len,
        )
        return self._metadata(step, plan)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """The plan of a step of decodes that vLLM captures, and replays with other rows and contexts.

        Raises ValueError for lengths of another type, a copy of which would not follow vLLM's.
        """
        step = common_attn_metadata
        contexts_R = step.seq_lens[: step.num_reqs]
        if contexts_R.dtype != torch.int32:
            raise ValueError(
                f"vLLM's context lengths are {contexts_R.dtype}, and ATOM captures int32: give "
                """--compilation-config '{"cudagraph_mode": "NONE"}'"""
            )
        return self._metadata(step, self._decodes(step, contexts_R))

    def _decodes(self, step: Any, contexts_R: torch.Tensor) -> AttentionPlan:
        """A plan of rows that decode: vLLM's own tensors, and numbers that bound all such steps."""
        rows = step.num_reqs
        return AttentionPlan(
            block_table_RW=step.block_table_tensor[:rows],
            context_lens_R=contexts_R,
            query_starts_R1=step.query_start_loc[: rows + 1],
            num_tokens=step.num_actual_tokens,
            min_query_len=self._decode_query_len,
            max_query_len=self._decode_query_len,
            max_context_len=self._longest,
            decode_query_len=self._decode_query_len,
        )

    def _metadata(self, step: Any, plan: AttentionPlan) -> StepMetadata:
        slots_T = step.slot_mapping[: step.num_actual_tokens]
        return StepMetadata(GroupContext(slots_T, plan), self.kv_cache_spec.block_size)


def _host_rows(
    step: Any, query_lens: np.ndarray, contexts_R: torch.Tensor, table_RW: torch.Tensor
) -> HostRows | None:
    """The rows on the host. On a GPU without the table: what a kernel's launch needs, and whole prompts."""
    if contexts_R.device.type == "cpu":
        return HostRows(query_lens, contexts_R.numpy(), table_RW.numpy())
    bounds = step.seq_lens_cpu_upper_bound
    if bounds is None:
        return None
    no_table = np.zeros((len(query_lens), 1), np.int32)
    return HostRows(query_lens, bounds[: len(query_lens)].numpy().astype(np.int32), no_table, exact=False)


class AtomAttentionBackend(AttentionBackend):
    """Paged attention by ATOM's ops, on keys and values in ATOM's layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(_PLAIN_CACHES)

    @staticmethod
    def get_name() -> str:
        """The name of vLLM's enum for backends out of its tree."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["AtomAttentionImpl"]:
        """Attention of the layers of vLLM's own models."""
        return AtomAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PlanBuilder]:
        """The maker of a step's metadata."""
        return PlanBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are part of the ops."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are part of the ops."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The layout, for vLLM 0.26."""
        return (num_blocks, block_size, 2, num_kv_heads, head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The order of a cache's dimensions, for vLLM 0.32 and later."""
        return contiguous_layouts()

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec of a layer of vLLM's own models, with ATOM's layout; for vLLM 0.32 and later."""
        return replace(spec, **packed_heads(spec.num_kv_heads, spec.head_size, spec.dtype))


class AtomLatentBackend(AtomAttentionBackend):
    """Latent attention: one cached row for each token."""

    @classmethod
    def is_mla(cls) -> bool:
        """The cache has latents, without heads."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec as it is: these layers are ATOM's alone."""
        return spec

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The layout, for vLLM 0.26."""
        return (num_blocks, block_size, head_size)


class CachedLayer(nn.Module, AttentionLayerBase):
    """What vLLM sees of one attention layer of ATOM's models: a name, a backend and a cache."""

    def __init__(self, group: KVGroup | LatentGroup, name: str, vllm_config: Any):
        """Registers itself with vLLM under `name`, which contains the layer's number."""
        super().__init__()
        cache = vllm_config.cache_config
        if cache.cache_dtype not in _PLAIN_CACHES:
            raise ValueError(
                f"--kv-cache-dtype {cache.cache_dtype}: ATOM's attention in vLLM keeps the compute dtype: "
                "omit it, or set ATOM_DISABLE_VLLM_PLUGIN_ATTENTION=1"
            )
        self.kv_cache = torch.tensor([])
        self._bound: tuple[torch.Tensor, int, KVLayer | LatentLayer] | None = None
        self._group = group
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"vLLM has a layer {name} already")
        layers[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The owner of the cache's layout."""
        return AtomLatentBackend if isinstance(self._group, LatentGroup) else AtomAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The size of the cache for vLLM's block pool."""
        return kv_spec(self._group, vllm_config.cache_config.block_size, vllm_config.model_config.dtype)

    def cache(self, block_size: int) -> KVLayer | LatentLayer:
        """The cache that vLLM has bound, in ATOM's layout, with blocks of so many tokens."""
        if self._bound is None or self._bound[0] is not self.kv_cache or self._bound[1] != block_size:
            self._bound = (self.kv_cache, block_size, self._viewed(block_size))
        return self._bound[2]

    def _viewed(self, block_size: int) -> KVLayer | LatentLayer:
        if isinstance(self._group, LatentGroup):
            return latent_layer(self.kv_cache, block_size, self._group)
        return kv_layer(self.kv_cache, block_size, self._group.kv_heads, self._group.head_dim)


@dataclass(frozen=True)
class _LayerArguments:
    """What vLLM's `Attention` says of a layer, in its order."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = "decoder"
    kv_sharing_target_layer_name: str | None = None
    sinks: torch.Tensor | None = None

    def check(self) -> None:
        """Raise ValueError for attention that the ops do not have."""
        refused = {
            "ALiBi": self.alibi_slopes is not None,
            f"{self.attn_type} attention": self.attn_type != "decoder",
            "layers that share a cache": self.kv_sharing_target_layer_name is not None,
            f"a KV cache in {self.kv_cache_dtype}": self.kv_cache_dtype not in _PLAIN_CACHES,
        }
        if found := [what for what, given in refused.items() if given]:
            raise ValueError(
                f"--attention-backend CUSTOM (ATOM) does not have {', '.join(found)}: omit the flag"
            )


class AtomAttentionImpl(AttentionImpl):
    """Attention of a layer of vLLM's own models by ATOM's ops, for `--attention-backend CUSTOM`."""

    def __init__(self, *args: Any, **kwargs: Any):
        """The arguments are those of `_LayerArguments`. Raises ValueError for attention that the ops lack."""
        asked = _LayerArguments(*args, **kwargs)
        asked.check()
        self.num_heads = asked.num_heads
        self.head_size = asked.head_size
        self.num_kv_heads = asked.num_kv_heads
        self.sliding_window = asked.sliding_window
        self._rule = AttentionRule(
            float(asked.scale), asked.sliding_window or 0, asked.sinks, asked.logits_soft_cap or 0.0
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        **results: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the step's keys and values [T, K, E], and fill `output` [T, H, E] by attention of `query`."""
        output = results.pop("output")
        if output is None or any(scale is not None for scale in results.values()):
            raise ValueError("ATOM's attention in vLLM fills the tensor `output`, without quantizing it")
        if attn_metadata is None:  # memory is measured before there is a cache
            return output.zero_()
        group = attn_metadata.group
        tokens = group.plan.num_tokens
        cache = kv_layer(kv_cache, attn_metadata.block_size, self.num_kv_heads, self.head_size)
        write_kv(key[:tokens], value[:tokens], cache, group.slots_T)
        output[:tokens] = paged_attention(query[:tokens], cache, group.plan, self._rule)
        return output
