"""SGLang's batch of a step as the attention plan of ATOM's ops.

SGLang keeps the slot of each token of a request, in pages of consecutive slots:

    req_to_token[request]     … 32 33 34 35 | 8 9 10 11 | …      pages of 4 slots
    block table of its row    … 8           | 2         | …
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atom_ops import AttentionPlan
from atom_ops.ops.attention.attention_plan import HostRows
from workers.layers.context import GroupContext


@dataclass(frozen=True)
class Step:
    """The plans of one step: for layers that keep all tokens, and for layers that keep a window of them."""

    full: GroupContext
    windowed: GroupContext
    """The same object where both keep their tokens in one pool."""


class Planner:
    """Makes the plans of each step. Steps are not captured in graphs."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int):
        """`req_to_token` [requests, tokens] has a slot for each token."""
        self._req_to_token = req_to_token
        self._page_size = page_size

    def step(self, batch: Any, windowed_slots: torch.Tensor | None = None) -> Step:
        """The plans of a `ForwardBatch`. Raises ValueError for a step that is neither prefill nor decode.

        `windowed_slots` maps a slot of the pool of all tokens to one of the pool of windows, if there is one.
        """
        query_lens = _query_lens(batch)
        contexts = batch.seq_lens
        on_host = contexts.device.type == "cpu"
        lengths = contexts if on_host or batch.seq_lens_cpu is None else batch.seq_lens_cpu
        if lengths.device.type != "cpu":
            raise ValueError(
                "ATOM's attention in SGLang needs the lengths of a step on the host: seq_lens_cpu"
            )
        context_lens = lengths.numpy().astype(np.int32)
        longest = int(context_lens.max(initial=1))
        # The first slot of each page.
        slots_RW = self._req_to_token[:, : longest : self._page_size].index_select(0, batch.req_pool_indices)
        full = self._group(slots_RW, batch.out_cache_loc, contexts, query_lens, context_lens)
        if windowed_slots is None:
            return Step(full, full)
        slots_T = windowed_slots[batch.out_cache_loc]
        slots_RW = windowed_slots[slots_RW.long()]
        return Step(full, self._group(slots_RW, slots_T, contexts, query_lens, context_lens))

    def _group(
        self,
        slots_RW: torch.Tensor,
        slots_T: torch.Tensor,
        contexts: torch.Tensor,
        query_lens: np.ndarray,
        context_lens: np.ndarray,
    ) -> GroupContext:
        table_RW = (slots_RW // self._page_size).int()
        longest_query = int(query_lens.max(initial=1))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        on_host = table_RW.device.type == "cpu"
        host_table = table_RW.numpy() if on_host else np.zeros((len(query_lens), 1), np.int32)
        plan = AttentionPlan(
            block_table_RW=table_RW,
            context_lens_R=contexts.int(),
            query_starts_R1=torch.from_numpy(starts).to(table_RW.device),
            num_tokens=len(slots_T),
            min_query_len=int(query_lens.min(initial=longest_query)),
            max_query_len=longest_query,
            max_context_len=int(context_lens.max(initial=1)),
            # On a GPU without the table: what a kernel's launch needs, and whole prompts.
            host=HostRows(query_lens, context_lens, host_table, exact=on_host),
        )
        return GroupContext(slots_T.long(), plan)


def _query_lens(batch: Any) -> np.ndarray:
    mode = batch.forward_mode
    if mode.is_decode_or_idle():
        return np.ones(len(batch.seq_lens), np.int32)
    if mode.is_extend_or_draft_extend_or_mixed():
        return np.asarray(batch.extend_seq_lens_cpu, np.int32)
    raise ValueError(f"ATOM's attention in SGLang does not run steps of the kind {mode.name}")
