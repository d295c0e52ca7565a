"""SGLang's attention backends `atom` and `aiter`: paged attention by ATOM's ops on SGLang's KV pools.

They serve the RadixAttention layers of ATOM's models and of SGLang's own.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from atom.plugin.sglang.kv_pool import kv_layer, windowed_slots
from atom.plugin.sglang.step_plan import Planner, Step
from atom_ops import AttentionRule, paged_attention, write_kv
from workers.layers.context import GroupContext


class AtomAttentionBackend(AttentionBackend):
    """Attention of prefills, of decodes and of both in one step."""

    def __init__(self, runner: Any):
        """`runner` is SGLang's model runner, whose pools exist."""
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._planner = Planner(self.req_to_token_pool.req_to_token, self.token_to_kv_pool.page_size)
        self._step: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step, before its first layer."""
        self._step = self._planner.step(forward_batch, windowed_slots(self.token_to_kv_pool))

    def plans(self, windowed: bool) -> GroupContext:
        """Slots and plan of the current step, for layers with or without a window."""
        assert self._step is not None, "init_forward_metadata comes first"
        return self._step.windowed if windowed else self._step.full

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Raises ValueError: steps are not captured."""
        raise ValueError("ATOM's attention in SGLang does not run in CUDA graphs: use --disable-cuda-graph")

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Attention [T, H * E] of the queries [T, H * E]; keys and values are written if `save_kv_cache`."""
        sinks, chunked = more.pop("sinks", None), more.pop("chunked", False)
        _check(layer, more)
        windowed = layer.sliding_window_size >= 0
        group = self.plans(windowed)
        cache = kv_layer(self.token_to_kv_pool, layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            heads = (-1, layer.tp_k_head_num, layer.head_dim)
            write_kv(k.view(heads), v.view(heads), cache, group.slots_T)
        # SGLang counts the tokens before the current one.
        window = layer.sliding_window_size + 1 if windowed else 0
        rule = AttentionRule(layer.scaling, window, sinks, layer.logit_cap or 0.0, chunked)
        q_THE = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        return paged_attention(q_THE, cache, group.plan, rule).flatten(1)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Whether SGLang may prepare steps by Triton kernels."""
        return torch.cuda.is_available()


def _check(layer: Any, more: dict[str, Any]) -> None:
    """Raise ValueError for attention that the ops do not have."""
    refused = {
        "cross attention": layer.is_cross_attention,
        f"{layer.attn_type.value} attention": layer.attn_type is not AttentionType.DECODER,
        "keys and values of different sizes, as in SGLang's own MLA models": layer.v_head_dim
        != layer.head_dim,
        **{f"the argument {name}": True for name, value in more.items() if value is not None},
    }
    if found := [what for what, given in refused.items() if given]:
        raise ValueError(f"ATOM's attention in SGLang does not have {', '.join(found)}: use another backend")
