"""Questions to the workers: which blocks of a prompt has a tier that other engines store blocks in, too?

The index of such a tier (`KVTier`) knows what this engine has stored, and what was there at its start. What
the workers find besides is added to the index; then it is loaded like all else.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from atom.shared.messages.kv_tiers import BlocksFound, FindBlocks
from engine_core.kv_tiers.kv_tier import KVTier

__all__ = ["ASKED_AT_ONCE", "BlockQuestions", "Question"]

ASKED_AT_ONCE = 2048
"""Most blocks of one question, so that no iteration takes long to note the answer."""


@dataclass(eq=False, slots=True)
class Question:
    """A question that not all ranks have answered; requests wait for it."""

    digests: Sequence[bytes]
    deadline: float
    """When the request stops to wait for it."""
    present: list[bytes]
    """By KV group: 1 for each block that all ranks have that have answered."""
    answered: set[int] = field(default_factory=set)
    """Ranks."""
    is_void: bool = False
    """Whether the prefix cache was reset since."""


class BlockQuestions:
    """The questions about one tier; `num_groups` KV groups, `num_ranks` workers."""

    def __init__(self, tier: KVTier, index: int, num_groups: int, num_ranks: int):
        """`index`: that of the tier in `AllocateKV.tiers`."""
        self._tier = tier
        self._index = index
        self._num_groups = num_groups
        self._num_ranks = num_ranks
        self._last_number = 0
        self._open: dict[int, Question] = {}
        self._unsent: list[FindBlocks] = []

    def __len__(self) -> int:
        """Questions without an answer."""
        return len(self._open)

    def ask(self, digests: Sequence[bytes], deadline: float) -> Question:
        """Ask about blocks, `ASKED_AT_ONCE` at most."""
        present = [b"\x01" * len(digests)] * self._num_groups
        question = Question(digests, deadline, present)
        self._last_number += 1
        self._open[self._last_number] = question
        self._unsent.append(FindBlocks(self._last_number, self._index, b"".join(digests)))
        return question

    def is_slow(self, now: float) -> bool:
        """Whether the answer to a question takes longer than requests wait."""
        return any(question.deadline < now for question in self._open.values())

    def take(self) -> list[FindBlocks]:
        """Questions to be sent to the workers."""
        unsent = self._unsent
        self._unsent = []
        return unsent

    def answered(self, message: BlocksFound) -> Question | None:
        """A rank has answered; returns the question once all have, with its blocks in the index.

        Raises ValueError for an answer to none of the questions.
        """
        question = self._open.get(message.number)
        if (
            question is None
            or message.rank in question.answered
            or [len(found) for found in message.present] != [len(question.digests)] * self._num_groups
        ):
            raise ValueError(f"worker {message.rank} answered a question that it did not get")
        question.answered.add(message.rank)
        both = zip(question.present, message.present, strict=True)
        question.present = [bytes(map(operator.and_, known, found)) for known, found in both]
        if len(question.answered) < self._num_ranks:
            return None
        del self._open[message.number]
        if not question.is_void:
            for group, known in enumerate(question.present):
                for place in reversed(range(len(known))):  # the first one is lost last
                    if known[place]:
                        self._tier.note(group, question.digests[place])
        return question

    def reset(self) -> None:
        """Forget the answers to questions asked so far."""
        for question in self._open.values():
            question.is_void = True
