"""N-gram speculation (prompt lookup): drafts are what followed the last tokens earlier in the text.

The id of each token is kept in the same slot as its KV, for one KV group. So a row's text is found
through its block table, also where its prompt came from the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.worker import KVSpec, NewRow, RecurrentStateSpec
from atom_ops import NO_DRAFT, NgramRule, RowState, StatePlan, TokenHistory, propose_ngrams, to_device
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.context import GroupContext
from workers.spec_decode.proposer import Method, Proposer

_ID_BYTES = 4
_NONE = np.empty(0, np.int32)
_FEW_ROWS = 8
"""Up to so many rows, looking up each of them on the host takes less time than the operators of all."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """The KV group whose slots have the token ids: one that keeps all tokens, if the model has one."""

    number: int
    reach: int
    """Last tokens of a sequence that the group keeps (its sliding window); 0: all."""


def text_group(groups: Sequence[CacheGroup]) -> TextGroup:
    """The group of a model; every model has a group of blocks. A full one, or the longest window."""
    reaches = [
        (group.window if isinstance(group, KVGroup) else 0, number) for number, group in enumerate(groups)
    ]
    full = [number for reach, number in reaches if reach == 0]
    if full:
        return TextGroup(full[0], 0)
    reach, number = max(reaches)
    return TextGroup(number, reach)


class Ngram(Method):
    """`--method ngram`."""

    def __init__(self, config: SpeculativeConfig, groups: Sequence[CacheGroup]):
        longest = config.prompt_lookup_max
        shortest = config.prompt_lookup_min
        assert longest is not None and shortest is not None, "resolved before any worker starts"
        self._rule = NgramRule(longest, shortest)
        self._group = text_group(groups)

    def kv_specs(self, specs: Sequence[KVSpec]) -> list[KVSpec]:
        changed = list(specs)
        spec = changed[self._group.number]
        assert not isinstance(spec, RecurrentStateSpec), "the text is in a group of blocks"
        more = spec.block_size * _ID_BYTES
        changed[self._group.number] = msgspec.structs.replace(
            spec, bytes_per_block=spec.bytes_per_block + more
        )
        return changed

    def proposer(
        self,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        num_blocks: Sequence[int],
        device: torch.device,
    ) -> Proposer:
        group = self._group
        table = tables[group.number]
        blocks = num_blocks[group.number]
        return NgramProposer(self._rule, group, table, blocks, limits, device)


class NgramProposer(Proposer):
    """Looks up n-grams in the text of each row: prediction, prompt and output."""

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
        self._rule = rule
        self._group = group.number
        self._device = device
        rows = limits.max_rows + 1
        self._lens = np.zeros(rows, np.int64)
        self._history = TokenHistory(
            # One more entry, for tokens without a slot.
            ids_S=torch.zeros(num_blocks * limits.block_size + 1, dtype=torch.int32, device=device),
            table_NW=table.device_table(device),
            predictions_NP=torch.empty(rows, limits.max_model_len, dtype=torch.int32, device=device),
            prediction_lens_N=torch.zeros(rows, dtype=torch.int64, device=device),
            block_size=limits.block_size,
            reach=group.reach,
        )

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        predictions = self._history.predictions_NP
        changed = []
        for new in new_rows:
            ids = np.frombuffer(new.prediction_ids, np.dtype("<i4"))[: predictions.shape[1]]
            if len(ids):
                predictions[new.row, : len(ids)] = to_device(ids.astype(np.int32), self._device)
            if len(ids) != self._lens[new.row]:
                self._lens[new.row] = len(ids)
                changed.append((new.row, len(ids)))
        if changed:
            rows, lens = to_device(np.array(changed, np.int64).T.copy(), self._device)
            self._history.prediction_lens_N.index_copy_(0, rows, lens)

    def add_tokens(self, ids_T: torch.Tensor, groups: Sequence[GroupContext | StatePlan]) -> None:
        group = groups[self._group]
        assert isinstance(group, GroupContext)
        # A slot of -1 is the last entry.
        self._history.ids_S[group.slots_T] = ids_T.int()

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
    text = _row_text(row, last, int(state.ids_N[row]), history)
    end = len(text) - 1
    found = np.flatnonzero(text[:end] == text[end])
    length = min(len(found), 1)
    while length and length < rule.longest and length <= end and text[end - length] >= 0:
        longer = found[found >= length]
        longer = longer[text[longer - length] == text[end - length]]
        if not len(longer):
            break
        found = longer
        length += 1
    if length < rule.shortest:
        return _NONE
    drafts = text[found[0] + 1 : found[0] + 1 + most]
    unknown = np.flatnonzero(drafts < 0)
    return drafts[: unknown[0]] if len(unknown) else drafts


def _row_text(row: int, last: int, last_id: int, history: TokenHistory) -> NDArray[np.int32]:
    """The prediction, the tokens up to position `last`, and -1 between them if the first are not kept."""
    begin = max(last - history.reach + 1, 0) if history.reach else 0
    at = np.arange(begin, last)
    blocks = history.table_NW.numpy()[row, at // history.block_size].astype(np.int64)
    ids = history.ids_S.numpy()[blocks * history.block_size + at % history.block_size]
    predicted = history.predictions_NP.numpy()[row, : int(history.prediction_lens_N[row])]
    gap = np.full(int(begin > 0), -1, np.int32)
    return np.concatenate((predicted, gap, ids, np.array([last_id], np.int32)))
