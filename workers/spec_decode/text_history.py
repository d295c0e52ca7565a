"""The text of each row, for the methods that look up what followed earlier: prediction, prompt and output.

The id of each token is kept in the same slot as its KV, for one KV group. So a row's text is found
through its block table, also where its prompt came from the prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import KVSpec, NewRow, RecurrentStateSpec
from atom_ops import StatePlan, TokenHistory, to_device
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import CacheGroup, RowGroup
from workers.layers.context import GroupContext
from workers.spec_decode.proposer import Method, Proposer

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class TextGroup:
    """The KV group whose slots have the token ids: one that keeps all tokens, if the model has one."""

    number: int
    reach: int
    """Last tokens of a sequence that the group keeps (its sliding window); 0: all."""


def text_group(groups: Sequence[CacheGroup]) -> TextGroup:
    """The group of a model; every model has a group of blocks. A full one, or the longest window."""
    reaches = [
        (group.window if isinstance(group, (KVGroup, RowGroup)) else 0, number)
        for number, group in enumerate(groups)
    ]
    full = [number for reach, number in reaches if reach == 0]
    if full:
        return TextGroup(full[0], 0)
    reach, number = max(reaches)
    return TextGroup(number, reach)


class TextMethod(Method):
    """A method that looks up texts, which takes 4 bytes for each token of one KV group."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        make: Callable[[TextGroup, GroupRows, int, BatchLimits, torch.device], Proposer],
    ):
        """`make` makes the proposer, from the table and the number of blocks of the group with the texts."""
        self._group = text_group(groups)
        self._make = make

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
        number = self._group.number
        return self._make(self._group, tables[number], num_blocks[number], limits, device)


class TextProposer(Proposer):
    """Keeps the text of each row."""

    def __init__(
        self,
        group: TextGroup,
        table: GroupRows,
        num_blocks: int,
        limits: BatchLimits,
        device: torch.device,
    ):
        """`num_blocks` and `table` are of the KV group `group`."""
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

    def kept(self, group: int) -> Sequence[torch.Tensor]:
        ids_S = self._history.ids_S[:-1]
        return [ids_S.view(-1, self._history.block_size)] if group == self._group else ()


def row_text(row: int, last: int, last_id: int, history: TokenHistory) -> NDArray[np.int32]:
    """The prediction, the tokens up to position `last`, and -1 between them if the first are not kept."""
    begin = max(last - history.reach + 1, 0) if history.reach else 0
    at = np.arange(begin, last)
    blocks = history.table_NW.numpy()[row, at // history.block_size].astype(np.int64)
    ids = history.ids_S.numpy()[blocks * history.block_size + at % history.block_size]
    predicted = history.predictions_NP.numpy()[row, : int(history.prediction_lens_N[row])]
    gap = np.full(int(begin > 0), -1, np.int32)
    return np.concatenate((predicted, gap, ids, np.array([last_id], np.int32)))


def longest_match(text: NDArray[np.int32], longest: int) -> tuple[int, NDArray[np.int64]]:
    """(length, where each ends) of the longest earlier matches of the end of `text`; without any (0, []).

    They have at most `longest` tokens. -1 in `text` matches nothing.
    """
    end = len(text) - 1
    found = np.flatnonzero(text[:end] == text[end])
    length = min(len(found), 1)
    while length and length < longest and length <= end and text[end - length] >= 0:
        longer = found[found >= length]
        longer = longer[text[longer - length] == text[end - length]]
        if not len(longer):
            break
        found = longer
        length += 1
    return length, found
