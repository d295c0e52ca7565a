import pytest

from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from engine_core.kv_cache.kv_plan import (
    cache_tokens,
    first_visible_block,
    longest_sequence,
    peak_blocks,
    plan_blocks,
    plan_slots,
)

FULL = FullAttentionSpec(block_size=4, bytes_per_block=100)
STATE = RecurrentStateSpec(bytes_per_slot=1000)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=30, window=6)


def test_a_window_counts_the_token_itself() -> None:
    # Position 9 sees 4 .. 9, position 8 sees 3 .. 8.
    assert first_visible_block(WINDOW, 9) == 1
    assert first_visible_block(WINDOW, 8) == 0
    assert first_visible_block(WINDOW, 0) == 0
    assert first_visible_block(FULL, 1000) == 0


@pytest.mark.parametrize("window", [1, 2, 5, 6, 8, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 8])
def test_peak_is_what_the_worst_position_needs(window: int, chunk: int) -> None:
    spec = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=window)
    worst = max(
        -(-(start + chunk) // 4) - first_visible_block(spec, start)
        for start in range(200)
        if start + chunk < 300
    )
    assert peak_blocks(spec, 10_000, chunk) == worst
    assert peak_blocks(spec, 4, chunk) == 1


def test_full_groups_share_the_memory_evenly() -> None:
    assert plan_blocks([FULL], 1050, 8, 16, 64) == [10]
    assert plan_blocks([FULL, FULL], 1050, 8, 16, 64) == [5, 5]
    assert plan_blocks([FULL], 99, 8, 16, 64) == [0]


def test_a_window_group_leaves_what_it_cannot_use_to_the_full_one() -> None:
    full, window = plan_blocks(
        [FULL, WINDOW], 100_000, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64
    )
    assert window == 4 * 4 + 4
    assert full == (100_000 - window * 30) // 100


def test_with_little_memory_all_groups_get_the_same() -> None:
    assert plan_blocks([FULL, WINDOW], 1300, 64, 64, 1024) == [10, 10]


@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_the_planned_window_group_is_never_what_limits(window: int) -> None:
    spec = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=window)
    specs: list[KVSpec] = [spec]
    planned = plan_blocks(specs, 1 << 30, 1, max_num_batched_tokens=8, max_model_len=4096)
    assert planned[0] >= peak_blocks(spec, 4096, 8)
    assert longest_sequence(specs, planned, 8) is None


def test_longest_sequence_and_capacity() -> None:
    assert longest_sequence([FULL, WINDOW], [5, 4], 4) == 20
    assert longest_sequence([FULL, WINDOW], [5, 2], 4) == 8
    assert cache_tokens([FULL, WINDOW], [5, 4]) == 20
    assert cache_tokens([WINDOW], [4]) == 16


def test_states_get_a_slot_for_every_request_before_blocks_get_the_rest() -> None:
    assert plan_blocks([FULL, STATE], 10_050, 4, 16, 64) == [60, 4]
    assert plan_blocks([STATE, FULL, STATE], 20_000, 4, 16, 64) == [4, 120, 4]


@pytest.mark.parametrize(
    ("kv_bytes", "planned"), [(6000, [30, 3]), (1500, [5, 1]), (1050, [0, 1]), (999, [9, 0])]
)
def test_states_leave_half_of_the_memory_or_are_one(kv_bytes: int, planned: list[int]) -> None:
    assert plan_blocks([FULL, STATE], kv_bytes, 64, 16, 64) == planned


def test_states_limit_no_length() -> None:
    assert longest_sequence([STATE, FULL], [1, 5], 4) == 20
    assert cache_tokens([FULL, STATE], [5, 1]) == 20
    assert peak_blocks(STATE, 10_000, 16) == 1


def test_saved_states_take_their_part_of_the_memory() -> None:
    """Two for each interval of tokens in blocks, and all states at most half of it."""
    assert plan_blocks([FULL, STATE], 10_050, 4, 16, 64, state_interval=1 << 20) == [60, 4]
    blocks, slots = plan_blocks([FULL, STATE], 1_000_000, 4, 16, 64, state_interval=256)
    intervals = blocks * FULL.block_size / 256
    assert slots == pytest.approx(4 + 2 * intervals, rel=0.05)
    _, slots = plan_blocks([FULL, STATE], 100_000, 4, 16, 64, state_interval=1)
    assert slots == 50_000 // STATE.bytes_per_slot


def test_a_slot_of_a_tier_takes_whole_units() -> None:
    for extra, slots in ((0, 4), (3996, 4), (3997, 2)):
        assert plan_slots([FULL], [10], 20_000, extra, unit=4096) == [slots]


def test_a_tier_keeps_the_first_state_of_a_slot() -> None:
    with_drafts = RecurrentStateSpec(bytes_per_slot=4000, places=4)
    assert plan_slots([with_drafts, FULL], [6, 10], 60_000) == plan_slots([STATE, FULL], [6, 10], 60_000)
