"""The index of a tier: slots are used again, and what they had on disk is removed."""

from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, TierSlots
from engine_core.kv_tiers.kv_tier import KVTier

A, B, C, D = (bytes([number]) * 8 for number in range(1, 5))


def put(tier: KVTier, digest: bytes) -> tuple[int, bytes]:
    reserved = tier.reserve(0, digest)
    assert reserved is not None
    tier.keep(0, reserved[0], digest, b"input" + digest)
    tier.release(0, reserved[0])
    return reserved


def check(tier: KVTier, *held: int) -> None:
    for _ in tier.check_integrity([list(held)]):
        pass


def test_the_least_recently_used_slot_is_taken() -> None:
    tier = KVTier(TierSlots(HOST_MEMORY, [2]))
    assert put(tier, A) == (0, b"") and put(tier, B) == (1, b"")
    tier.use(0, 0)
    assert put(tier, C) == (1, b"")
    assert tier.find(0, A, b"input" + A) == 0
    assert tier.find(0, A, b"other") is None and tier.find(0, B, b"input" + B) is None
    check(tier)


def test_held_slots_are_not_taken() -> None:
    tier = KVTier(TierSlots(HOST_MEMORY, [1]))
    put(tier, A)
    tier.hold(0, 0)
    assert tier.reserve(0, B) is None
    check(tier, 0)
    tier.lose(0, 0)
    tier.release(0, 0)
    assert tier.find(0, A, b"input" + A) is None
    assert tier.reserve(0, B) == (0, b"")


def test_a_tier_by_content_says_what_to_remove() -> None:
    tier = KVTier(TierSlots(DISK, [2]))
    put(tier, A)
    put(tier, B)
    assert tier.find(0, A, b"the reader compares it") == 0
    assert put(tier, C) == (0, A)
    slot, replaced = tier.reserve(0, D) or (-1, b"")
    assert (slot, replaced) == (1, B)
    tier.release(0, slot)  # it could not be written: what may be there is removed with the next block
    assert put(tier, A) == (1, D)


def test_what_is_stored_again_elsewhere_is_not_removed() -> None:
    tier = KVTier(TierSlots(DISK, [2]))
    slot, _ = put(tier, A)
    tier.hold(0, slot)
    tier.lose(0, slot)
    other, _ = put(tier, A)
    assert other != slot
    tier.release(0, slot)
    assert put(tier, B) == (slot, b"")


def test_blocks_of_an_earlier_start_are_found_if_all_ranks_have_them() -> None:
    tier = KVTier(TierSlots(DISK, [3]))
    assert tier.adopt([[A + B + C], [C + A + D]]) == 2
    assert [tier.find(0, digest, b"") is not None for digest in (A, B, C, D)] == [True, False, True, False]
    check(tier)
    assert put(tier, D)[1] == B  # the one that only one rank has
    assert put(tier, B)[1] == A  # the least recently used


def test_no_more_blocks_are_taken_over_than_there_are_slots() -> None:
    tier = KVTier(TierSlots(DISK, [2]))
    assert tier.adopt([[A + B + C]]) == 2
    check(tier)
