"""The outputs that follow one grammar, from the worker's side of the grammar's process."""

import mmap
import os
import socket
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import FollowOutput, FollowOutputs, ForgetOutput, MasksReady, RowGrammar
from workers.grammar.frame_socket import FrameSocket
from workers.grammar.output_matcher import ALL_IDS, Words

KEPT_OUTPUTS = 64
"""Outputs without a row that a grammar's process keeps: their requests may be resumed."""


@dataclass(slots=True)
class Output:
    """One output, and how far the process is with it."""

    owner: int
    """Number of the output's request."""
    slot: int
    grammar: RowGrammar
    num_ids: int
    """Ids that were sent."""
    serial: int
    """Number of the last message."""
    first_serial: int = 0
    """Number of the message that began it: its slot may have had another output before."""
    done: int = 0
    """Number of the last message whose mask is written."""
    failure: str = ""
    row: int | None = None
    """The row that it has."""
    num_drafts: int = 0
    """Drafts of the last message."""

    @property
    def is_ready(self) -> bool:
        """Whether the slot has the mask of the output's next id."""
        return self.done == self.serial


class FollowedGrammar:
    """Outputs in the process of their grammar. No call waits for it."""

    is_slow = False
    """Whether an output has missed its step since the last one that was ready in time."""

    def __init__(
        self,
        key: bytes,
        connection: socket.socket,
        masks: mmap.mmap,
        num_slots: int,
        masks_per_slot: int,
        pid: int,
        parent: int,
    ):
        """The process `pid` has started, and shares the memory of `masks`, int32 [slots, masks_per_slot, W].

        `parent`: id of the process that forked it.
        """
        self.key = key
        self.pid = pid
        self.parent = parent
        self._frames = FrameSocket(connection)
        self._words_SJW: Words = np.frombuffer(masks, np.int32).reshape(num_slots, masks_per_slot, -1)
        self._free = list(range(num_slots))[::-1]
        self._outputs: OrderedDict[int, Output] = OrderedDict()  # the longest unused first
        self._by_slot: dict[int, Output] = {}
        self._decoder: Decoder[MasksReady] = Decoder(MasksReady)
        self._serial = 1  # of the next message
        self._unsent: list[FollowOutput] = []
        self._is_dropped = False

    @property
    def is_closed(self) -> bool:
        """Whether its process follows no output any more."""
        return self._frames.is_closed

    @property
    def has_died(self) -> bool:
        """Whether the process has ended by itself, or with its parent."""
        return self._frames.is_closed and not self._is_dropped

    def fileno(self) -> int:
        """For `select.poll`."""
        return self._frames.fileno()

    def follow(self, owner: int, row: int, grammar: RowGrammar, ids: list[int]) -> Output:
        """Follow the output of a row, whose first `ids` are known; goes on where the process has got to."""
        output = self._outputs.pop(owner, None)
        if output is not None and (output.grammar != grammar or output.num_ids > len(ids)):
            self._forget(output)
            output = None
        if output is None:
            output = self._begin(owner, grammar, ids)
        elif len(ids) > output.num_ids:
            self.accept(output, ids[output.num_ids :])
        output.row = row
        self._outputs[owner] = output
        self.flush()
        return output

    def accept(self, output: Output, ids: list[int], drafts: list[int] | None = None) -> None:
        """Append these ids to the output at the next `flush`, and after them, on trial, the drafts."""
        self._send(output, ids, None, drafts)

    def flush(self) -> None:
        """Send what was begun and accepted."""
        if self._unsent:
            self._frames.send(encode(FollowOutputs(self._serial, self._unsent)))
            self._unsent = []
            self._serial += 1
        self._frames.flush()

    def release(self, output: Output, row: int) -> None:
        """Take the row from an output: it has another request now."""
        if output.row != row:
            return  # it has another row already
        output.row = None
        without = [one for one in self._outputs.values() if one.row is None]
        for one in without[:-KEPT_OUTPUTS]:
            self._forget(self._outputs.pop(one.owner))

    def update(self) -> None:
        """Take in what the process has sent."""
        self._frames.flush()
        for frame in self._frames.receive():
            ready = self._decoder.decode(frame)
            for slot in ready.slots:
                output = self._by_slot.get(slot)
                if output is not None and max(output.first_serial, output.done + 1) <= ready.serial:
                    output.done = ready.serial
                    output.failure = ready.failures.get(slot, "")

    def copy_mask(self, output: Output, words_W: Words, num_before: int) -> None:
        """Copy the mask after the first `num_before` drafts of an output that is ready."""
        is_known = num_before <= output.num_drafts
        words_W[:] = self._words_SJW[output.slot, num_before] if is_known else ALL_IDS

    def close(self) -> None:
        """End the process."""
        self._is_dropped = True
        self._frames.close()

    def _begin(self, owner: int, grammar: RowGrammar, ids: list[int]) -> Output:
        output = Output(owner, self._free.pop(), grammar, 0, 0, self._serial)
        self._by_slot[output.slot] = output
        self._send(output, ids, grammar)
        return output

    def _send(
        self, output: Output, ids: list[int], begin: RowGrammar | None, drafts: list[int] | None = None
    ) -> None:
        output.serial = self._serial
        output.num_ids += len(ids)
        output.num_drafts = len(drafts or [])
        self._unsent.append(FollowOutput(output.slot, ids, begin, drafts or []))

    def _forget(self, output: Output) -> None:
        self.flush()
        self._free.append(output.slot)
        del self._by_slot[output.slot]
        self._frames.send(encode(ForgetOutput(output.slot)))


def shared_masks(num_slots: int, num_words: int) -> tuple[int, mmap.mmap]:
    """(descriptor, mapping) of memory for masks, which takes pages as they are written."""
    size = 4 * num_slots * num_words
    descriptor = os.memfd_create("atom-grammar-masks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor, mmap.mmap(descriptor, size)
