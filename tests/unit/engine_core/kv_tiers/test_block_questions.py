"""What other engines have stored is known once every rank has answered."""

import pytest

from atom.shared.messages.kv_tiers import DISK, BlocksFound, FindBlocks, TierSlots
from engine_core.kv_tiers.block_questions import BlockQuestions
from engine_core.kv_tiers.kv_tier import KVTier

DIGESTS = [bytes([number]) * 8 for number in range(4)]


def test_a_block_must_be_there_on_all_ranks() -> None:
    tier = KVTier(TierSlots(DISK, [9, 9]))
    questions = BlockQuestions(tier, 1, 2, 2)
    question = questions.ask(DIGESTS, 5.0)
    assert questions.take() == [FindBlocks(1, 1, b"".join(DIGESTS))] and questions.take() == []
    assert not questions.is_slow(4.0) and questions.is_slow(6.0)
    assert questions.answered(BlocksFound(0, 1, [b"\1\1\0\1", b"\1\1\1\1"])) is None
    for wrong in (BlocksFound(0, 1, [b"\1" * 4] * 2), BlocksFound(1, 2, []), BlocksFound(1, 1, [b"\1"] * 2)):
        with pytest.raises(ValueError, match="did not get"):
            questions.answered(wrong)
    assert questions.answered(BlocksFound(1, 1, [b"\1\0\1\1", b"\0\0\0\1"])) is question
    found = [[tier.find(group, digest, b"") is not None for digest in DIGESTS] for group in range(2)]
    assert found == [[True, False, False, True], [False, False, False, True]]
    assert len(questions) == 0


def test_an_answer_after_a_reset_is_not_noted() -> None:
    tier = KVTier(TierSlots(DISK, [9]))
    questions = BlockQuestions(tier, 0, 1, 1)
    question = questions.ask(DIGESTS, 5.0)
    questions.reset()
    assert questions.answered(BlocksFound(0, 1, [b"\1" * 4])) is question
    assert tier.find(0, DIGESTS[0], b"") is None
