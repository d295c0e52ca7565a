"""What the tokens of a drafted block see of it, and of the tokens before: the attention plans of blocks.

    position of a token     s    s+1   s+2   s+3
    whole                   all  all   all   all       every token before the block, and all of the block
    causal                  s    s+1   s+2   s+3       up to the token itself
    ahead                   all  all   all   all       all of the block; before it, what a window has, that
                                                       ends at the token itself

A plan has no rows for a block alone. With `whole` and `causal` each token is a row of its own, with the
context that it sees. A window begins at the last token of a row's context less its size, so with `ahead` the
tokens of a block are one row, in which each sees some after its own. Tokens after a row's limit are in no
context: they are a row without one.
"""

from dataclasses import dataclass

import numpy as np
import torch

from atom_ops import AttentionPlan, plan_attention
from workers.spec_decode.drafter import BlockView, one_token_plan

__all__ = ["Blocks"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """One block of each of R rows, in one block table."""

    width: int
    last_R: torch.Tensor
    """int64: the position of a block's first token."""
    contexts_R: torch.Tensor
    """int32: tokens up to the end of the block, or the row's limit; 0 for padding."""
    table_RW: torch.Tensor
    longest: int
    """No context is longer."""
    split_tokens: int

    def plan(self, view: BlockView, on_host: bool) -> AttentionPlan:
        """`on_host`: whether the rows are on the host, where attention may read them."""
        if view is BlockView.AHEAD:
            return self._ahead(on_host)
        contexts_T = self.contexts_R.repeat_interleave(self.width)
        if view is BlockView.CAUSAL:
            contexts_T = torch.minimum(contexts_T, (self._positions.flatten() + 1).int())
        table_TW = self.table_RW.repeat_interleave(self.width, 0)
        return one_token_plan(contexts_T, table_TW, self.longest, self.split_tokens, on_host)

    @property
    def _positions(self) -> torch.Tensor:
        """int64 [R, J], also of tokens after a limit."""
        return self.last_R[:, None] + torch.arange(self.width, device=self.last_R.device)

    def _ahead(self, on_host: bool) -> AttentionPlan:
        seen_R = (self.contexts_R - self.last_R).clamp(0, self.width).masked_fill(self.contexts_R == 0, 0)
        lens_P = torch.stack((seen_R, self.width - seen_R), 1).flatten().int()
        contexts_P = torch.stack((self.contexts_R, torch.zeros_like(self.contexts_R)), 1).flatten()
        table_PW = self.table_RW.repeat_interleave(2, 0)
        ahead_T = (self.contexts_R[:, None] - 1 - self._positions).clamp(min=0).flatten().int()
        device = self.table_RW.device
        if on_host:
            lens, contexts, table, ahead = (each.numpy() for each in (lens_P, contexts_P, table_PW, ahead_T))
            kept = np.flatnonzero(lens)
            return plan_attention(
                lens[kept], contexts[kept], table[kept], device, self.split_tokens, self.width, ahead
            )
        starts_P1 = torch.zeros(len(lens_P) + 1, dtype=torch.int32, device=device)
        torch.cumsum(lens_P, 0, dtype=torch.int32, out=starts_P1[1:])
        return AttentionPlan(
            table_PW,
            contexts_P,
            starts_P1,
            num_tokens=len(ahead_T),
            min_query_len=1,
            max_query_len=self.width,
            max_context_len=self.longest,
            split_tokens=self.split_tokens,
            decode_query_len=self.width,
            ahead_T=ahead_T,
        )
