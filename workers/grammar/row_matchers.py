"""The grammars of the rows of the persistent batch: which ids each of them may sample next.

A row's output is followed in the process of its grammar. To mask the logits of step n + 1 that needs the
id of step n: it is copied to the host after step n, while the forward pass of n + 1 runs, so only the
sampler waits for the mask, and not for long: a row without its mask is late. What it samples is dropped, and
its request returns to the queue. A grammar that was late is not waited for again until it is in time.

With tensor parallelism rank 0 follows outputs, and the others get its masks.

G rows with a grammar, W words of 32 ids each.
"""

import select
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from atom.shared.messages.worker import NewRow
from atom_ops import NO_DRAFT, to_device
from parallel.communicator import Communicator
from workers.grammar.followed import FollowedGrammar, Output
from workers.grammar.library import GrammarLibrary
from workers.grammar.output_matcher import ALL_IDS, WORD_BITS, Words

MAX_WAIT_S = 0.02
"""How long a step waits for the masks of all its rows."""
_DIED = (
    "its grammar is too ambiguous: to follow the output took more CPU time or memory than a grammar may; let "
    "each text be derived in one way"
)


@dataclass(slots=True)
class _Row:
    """A row with a grammar; on other ranks than the first its output is not followed."""

    followed: FollowedGrammar | None
    output: Output | None
    other_id: int
    """The smallest id that does not end the output."""
    is_late: bool = False
    """Whether the row has missed a step: nothing that it samples counts."""

    @property
    def is_ready(self) -> bool:
        """Whether a step need not wait for the row."""
        assert self.followed is not None and self.output is not None
        return self.is_late or self.followed.is_closed or self.output.is_ready

    @property
    def failure(self) -> str:
        """Why the row cannot go on."""
        if self.followed is None or self.output is None:
            return ""
        return self.output.failure


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Ids of G rows on their way to the host, sampled after the same number of drafts."""

    rows: list[_Row]
    ids_G: torch.Tensor
    kept_G: torch.Tensor | None
    """bool: whether the drafts before were accepted; None: there are none."""


class RowMatchers:
    """The grammars of all rows, in steps: `masks`, sample, `record`."""

    def __init__(
        self, library: GrammarLibrary | None, vocab_size: int, device: torch.device, tp: Communicator
    ):
        self._library = library
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device
        self._tp = tp
        self._rows: dict[int, _Row] = {}
        self._sampled: list[_Sampled] = []
        self._sampled_rows: list[int] = []
        """The rows of the first of these, which are those of all."""
        self._drafts_GK: torch.Tensor | None = None
        """The drafts that follow what these rows sampled, int64, on their way to the host."""
        self._copied: torch.cuda.Event | None = None
        """Event after the copies; None: they are on the host."""

    @property
    def rows(self) -> Set[int]:
        """The rows with a grammar."""
        return self._rows.keys()

    def set_row(self, new: NewRow) -> None:
        """Set or remove the grammar of a row that is assigned to a new request."""
        before = self._rows.pop(new.row, None)
        if before is not None and before.followed is not None and before.output is not None:
            before.followed.release(before.output, new.row)
        if new.grammar is None:
            return
        other_id = next(number for number in count() if number not in new.grammar.stop_ids)
        if self._tp.rank:
            self._rows[new.row] = _Row(None, None, other_id)
            return
        assert self._library is not None, "a row has a grammar, and the sampler no library"
        self._settle()  # what the request sampled before it was preempted
        followed = self._library.followed(new.grammar.key)
        ids: list[int] = np.frombuffer(new.output_ids, np.dtype("<i4")).tolist()
        output = followed.follow(new.request_id, new.row, new.grammar, ids)
        self._rows[new.row] = _Row(followed, output, other_id)

    def other_ids(self, rows: Sequence[int]) -> list[int]:
        """An id for each row that does not end its output."""
        return [self._rows[row].other_id for row in rows]

    def masks(self, rows: Sequence[int], num_before: int = 0) -> torch.Tensor:
        """The ids that these rows may sample, int32 [G, W] on the device: a bit for each id, 1 if it may.

        After the row's first `num_before` drafts; a step asks for those of 0 first, for all of its rows.
        """
        if self._tp.rank:
            mask_GW = torch.empty(len(rows), self._num_words, dtype=torch.int32, device=self._device)
            return self._tp.broadcast(mask_GW)
        if not num_before:
            self._settle()
            self._wait([self._rows[row] for row in rows])
        words_GW = np.empty((len(rows), self._num_words), np.int32)
        for index, row in enumerate(rows):
            self._fill(self._rows[row], words_GW[index], num_before)
        mask_GW = torch.from_numpy(words_GW)
        if self._device.type != "cpu":
            mask_GW = mask_GW.pin_memory().to(self._device, non_blocking=True)
        return self._tp.broadcast(mask_GW)

    def failures(self, rows: Sequence[int]) -> dict[int, str]:
        """Why some of these rows cannot go on, by row."""
        return {row: reason for row in rows if (reason := self._rows[row].failure)}

    def late(self, rows: Sequence[int]) -> list[int]:
        """Which of these rows had no mask in this step or an earlier one."""
        return [row for row in rows if self._rows[row].is_late]

    def record(self, rows: Sequence[int], ids_G: torch.Tensor, kept_G: torch.Tensor | None = None) -> None:
        """Note ids (int64) that these rows have sampled; those count that are `kept_G` (bool).

        With `kept_G` there may be more of the same step, and `propose` comes after the last.
        """
        if self._tp.rank:
            return
        kept_G = None if kept_G is None else _to_host(kept_G)
        if not self._sampled:
            self._sampled_rows = list(rows)
        self._sampled.append(_Sampled([self._rows[row] for row in rows], _to_host(ids_G), kept_G))
        if kept_G is None:
            self._send(ids_G.is_cuda)

    def propose(self, drafts_NK: torch.Tensor) -> None:
        """Note the drafts (int64), of all rows of the batch, that follow what the rows have sampled."""
        if not self._sampled:
            return
        rows_G = to_device(np.array(self._sampled_rows, np.int64), drafts_NK.device)
        self._drafts_GK = _to_host(drafts_NK.index_select(0, rows_G))
        self._send(drafts_NK.is_cuda)

    def _send(self, is_cuda: bool) -> None:
        if is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._settle()  # the process follows while the next forward pass runs

    def _settle(self) -> None:
        """Send on the ids of the last step."""
        if not self._sampled:
            return
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._sampled[0].rows
        ids: dict[int, list[int]] = {id(row): [] for row in rows}
        for sampled in self._sampled:
            kept = [True] * len(sampled.rows) if sampled.kept_G is None else sampled.kept_G.tolist()
            for row, token_id, is_kept in zip(sampled.rows, sampled.ids_G.tolist(), kept, strict=True):
                if is_kept:
                    ids[id(row)].append(token_id)
        drafts: list[list[int]] = [[]] * len(rows) if self._drafts_GK is None else self._drafts_GK.tolist()
        self._sampled = []
        self._drafts_GK = None
        self._copied = None
        for row, following in zip(rows, drafts, strict=True):
            if row.followed is not None and row.output is not None and not row.is_late:
                row.followed.accept(row.output, ids[id(row)], [one for one in following if one != NO_DRAFT])
        for followed in _grammars(rows):
            followed.flush()

    def _wait(self, rows: Sequence[_Row]) -> None:
        """Wait for the rows' masks; those that have none in time are late."""
        grammars = _grammars(rows)
        for followed in grammars:
            followed.update()
        self._poll([row for row in rows if not row.is_ready and row.followed and not row.followed.is_slow])
        for followed in grammars:
            own = [row for row in rows if row.followed is followed and not row.is_late]
            late = [row for row in own if not row.is_ready]
            followed.is_slow = bool(late) if own else followed.is_slow
            for row in late:
                row.is_late = True
        for row in rows:
            if self._library is not None and row.followed is not None and row.followed.has_died:
                row.is_late = True
                self._library.report_death(row.followed, _DIED)

    def _poll(self, waiting: Sequence[_Row]) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for followed in _grammars(waiting):
                poll.register(followed, select.POLLIN)
            poll.poll(left * 1000)
            for followed in _grammars(waiting):
                followed.update()
            waiting = [row for row in waiting if not row.is_ready]

    def _fill(self, row: _Row, words_W: Words, num_before: int) -> None:
        if row.is_late or row.failure:
            words_W[:] = ALL_IDS
        elif row.followed is not None and row.output is not None:
            row.followed.copy_mask(row.output, words_W, num_before)


def _grammars(rows: Sequence[_Row]) -> list[FollowedGrammar]:
    """The grammars of these rows, each once, whose processes have not ended."""
    found = {id(row.followed): row.followed for row in rows if row.followed is not None}
    return [followed for followed in found.values() if not followed.is_closed]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or of a GPU tensor a copy that is filled asynchronously."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
