"""N-gram speculation (prompt lookup): drafts are what followed the last tokens earlier in the text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.config.speculative import SpeculativeConfig
from atom_ops import NO_DRAFT, NgramRule, RowState, TokenHistory, propose_ngrams
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.layers.attention.cache_groups import CacheGroup
from workers.spec_decode.text_history import TextGroup, TextMethod, TextProposer, longest_match, row_text

_NONE = np.empty(0, np.int32)
_FEW_ROWS = 8
"""Up to so many rows, looking up each of them on the host takes less time than the operators of all."""


def ngram_method(config: SpeculativeConfig, groups: Sequence[CacheGroup]) -> TextMethod:
    """`--method ngram`."""
    longest = config.prompt_lookup_max
    shortest = config.prompt_lookup_min
    assert longest is not None and shortest is not None, "resolved before any worker starts"
    return TextMethod(groups, partial(NgramProposer, NgramRule(longest, shortest)))


class NgramProposer(TextProposer):
    """Looks up n-grams in the text of each row."""

    def __init__(
        self,
        rule: NgramRule,
        group: TextGroup,
        table: GroupRows,
        num_blocks: int,
        limits: BatchLimits,
        device: torch.device,
    ):
        """`num_blocks` and `table` are of the KV group `group`."""
        super().__init__(group, table, num_blocks, limits, device)
        self._rule = rule

    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        if allowed_R is not None:
            rows_R = rows_R[allowed_R > 0]
        history = self._history
        if self._device.type == "cpu" and len(rows_R) <= _FEW_ROWS:
            for row in rows_R.tolist():
                drafts = row_drafts(row, state, history, self._rule)
                state.drafts_NK[row] = NO_DRAFT
                state.drafts_NK.numpy()[row, : len(drafts)] = drafts
            return
        if self._device.type == "cpu":  # graphs need one width for all steps
            longest = int(self._lens.max())
            history = replace(history, predictions_NP=history.predictions_NP[:, :longest])
        propose_ngrams(rows_R, state, history, self._rule, max_positions)


def row_drafts(row: int, state: RowState, history: TokenHistory, rule: NgramRule) -> NDArray[np.int32]:
    """What `propose_ngrams` proposes for one row, with all tensors on the host; at most K ids."""
    last = int(state.positions_N[row])
    most = min(int(state.limits_N[row]) - 2 - last, state.drafts_NK.shape[1])
    if last < 0 or most <= 0:
        return _NONE
    text = row_text(row, last, int(state.ids_N[row]), history)
    length, found = longest_match(text, rule.longest)
    if length < rule.shortest:
        return _NONE
    drafts = text[found[0] + 1 : found[0] + 1 + most]
    unknown = np.flatnonzero(drafts < 0)
    return drafts[: unknown[0]] if len(unknown) else drafts
