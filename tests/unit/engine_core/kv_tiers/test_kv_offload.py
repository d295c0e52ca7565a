"""Blocks that the cache evicts come back from tiers: the same tokens, no step that waits, nothing lost."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from atom.shared.config.kv_transfer import KVRole
from atom.shared.messages.engine import pack_ids, unpack_ids
from atom.shared.messages.kv_tiers import (
    DISK,
    HOST_MEMORY,
    REMOTE,
    BlocksCopied,
    CopyBlocks,
    FindBlocks,
    TierSlots,
)
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from engine_core.kv_cache import state_checkpoints
from engine_core.kv_tiers import tier_loads, tier_stores, tier_transfers
from engine_core.kv_tiers.tier_loads import LOAD_DEADLINE_S
from engine_core.requests import iteration_quota
from engine_core.requests.request import State
from engine_core.requests.token_ids import Prompt, TokenIds
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.engine.core_driver import CoreDriver

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=6)
STATE = RecurrentStateSpec(bytes_per_slot=1)
LAYOUTS: dict[str, tuple[list[KVSpec], list[int]]] = {
    "full": ([FULL], [14]),
    "full and window": ([FULL, WINDOW], [14, 12]),
    "state": ([STATE, FULL], [5, 14]),
    "states and windows": ([FULL, STATE, WINDOW], [14, 5, 12]),
}
FIRST = [1, 2, 3, 4, 5, 6, 7, 0] * 3
OTHER = [5, 6, 7, 0, 1, 2, 3, 4] * 3
HOST = [TierSlots(HOST_MEMORY, [30])]
FILES = [TierSlots(DISK, [30])]


def driver(
    tiers: list[TierSlots] = HOST, layout: str = "full", rows: int = 4, budget: int = 32, blocks: int = 0
) -> CoreDriver:
    specs, sizes = LAYOUTS[layout]
    slots = [TierSlots(tier.medium, tier.num_slots * len(specs)) for tier in tiers]
    made = CoreDriver(specs, [blocks] * len(specs) if blocks else sizes, Limits(rows, budget), tiers=slots)
    return made


def turn(run: CoreDriver, number: int, prompt: list[int], **fields: Any) -> int:
    """Cached tokens of a request that runs alone."""
    run.add(number, prompt, 2, **fields)
    run.run()
    return run.done[number].cached_tokens


def evict(run: CoreDriver, number: int) -> None:
    """Fill the cache with blocks of other prompts."""
    for each in range(3):
        turn(run, number + each, [each, *OTHER, each])


@pytest.mark.parametrize("tiers", [HOST, FILES, HOST + FILES], ids=["memory", "disk", "both"])
def test_an_evicted_prefix_comes_back(tiers: list[TierSlots]) -> None:
    run = driver(tiers)
    assert turn(run, 1, FIRST) == 0
    evict(run, 10)
    tokens = TokenIds(Prompt(pack_ids(FIRST)))
    assert run.core._kv.find_prefix(run.core._kv.new_blocks(tokens)) == 0
    assert turn(run, 2, FIRST) == len(FIRST) - 4
    stats = run.core.stats().kv_tiers
    assert [tier.medium for tier in stats] == [tier.medium for tier in tiers]
    assert [tier.loaded for tier in stats] == [5, 0][: len(tiers)]
    assert [tier.hits for tier in stats] == [20, 0][: len(tiers)]
    assert all(tier.stored >= 6 and tier.failed == 0 for tier in stats)
    assert run.core.stats().prefix_hits == 20


def test_without_tiers_it_is_computed_again() -> None:
    run = driver([])
    assert turn(run, 1, FIRST) == 0
    evict(run, 10)
    assert turn(run, 2, FIRST) == 0 and run.core.stats().kv_tiers == []


def test_other_requests_run_while_one_waits_for_its_blocks() -> None:
    run = driver(blocks=20)
    turn(run, 1, FIRST)
    evict(run, 20)
    run.add(30, [3] * 5, 18)
    run.send()
    run.deliver()
    run.add(2, FIRST, 2)
    run.send()
    assert run.core._scheduler.requests[2].state is State.HELD and len(run.copies) == 1
    before = len(run.live[30].received)
    for _ in range(4):
        run.deliver()
        run.send()
    assert len(run.live[30].received) == before + 4
    run.run()
    assert run.done[2].cached_tokens == 20


def test_a_load_that_takes_too_long_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    run.add(2, FIRST, 2)
    assert not run.send()
    run.clock.now += LOAD_DEADLINE_S + 1
    run.add(3, [*FIRST, 1], 2)
    while run.send() or run.results:
        if run.results:
            run.deliver()
    assert run.done[2].cached_tokens == 0 and 3 in run.done
    assert run.copies[0].is_load
    assert "were not loaded from a tier within 10 s" in caplog.text
    run.run()


def test_sequences_of_one_request_wait_for_one_load() -> None:
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    run.add(2, FIRST, 2, n=3)
    assert not run.send()
    assert [message.is_load for message in run.copies] == [True]
    run.run()
    assert [run.done[number].cached_tokens for number in (2, 3, 4)] == [20] * 3
    assert run.core.stats().kv_tiers[0].loaded == 5


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_the_rest_of_a_prefix_is_computed(lost: int) -> None:
    """Its blocks are found in the tier up to the first that could not be read, which is forgotten there."""
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    run.add(2, FIRST, 2)
    assert not run.send()
    run.copy(0, [lost])
    run.run()
    assert run.done[2].cached_tokens == 4 * lost
    assert run.core.stats().kv_tiers[0].failed == 1


def test_a_block_that_is_lost_during_a_long_lookup_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    monkeypatch.setattr(tier_loads, "_LOOKED_UP_AT_ONCE", 1)
    monkeypatch.setattr(iteration_quota, "UNITS_PER_ITERATION", 12)
    run.add(2, FIRST, 2)
    for _ in range(2):
        run.send()
    assert not run.copies and run.core.has_deferred_work, "the lookup is over"
    (digest,), (hash_input,) = run.core._scheduler.requests[2].blocks.hashes(3, 4)
    assert run.core._kv.offload is not None
    (tier,) = run.core._kv.offload.tiers
    slot = tier.find(0, digest, hash_input)
    assert slot is not None
    tier.lose(0, slot)
    run.run()
    assert run.done[2].cached_tokens == 12


def test_an_abort_leaves_the_load_to_its_end() -> None:
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    run.add(2, FIRST, 2)
    assert not run.send()
    run.abort(2)
    assert run.core.stats().kv_blocks_used == 5
    run.copy()
    assert run.core.stats().kv_blocks_used == 0
    assert turn(run, 3, FIRST) == 20 and run.core.stats().kv_tiers[0].loaded == 5


def test_a_reset_forgets_what_is_being_copied() -> None:
    run = driver()
    turn(run, 1, FIRST)
    evict(run, 10)
    run.add(2, FIRST, 2)
    assert not run.send()
    run.core.reset_prefix_cache()
    run.core.check_integrity()
    run.run()
    assert run.done[2].cached_tokens == 0
    assert turn(run, 3, FIRST) == 0, "what it computed before the reset is not found"
    assert turn(run, 4, FIRST) == 20


def test_only_long_or_hit_sequences_are_stored() -> None:
    run = driver()
    run.core._kv.offload_to(HOST, min_tokens=20)
    turn(run, 1, FIRST[:12])
    assert run.core.stats().kv_tiers[0].stored == 0
    turn(run, 2, FIRST[:12])
    assert run.core.stats().kv_tiers[0].stored == 2
    turn(run, 3, OTHER)
    assert run.core.stats().kv_tiers[0].stored == 2 + 6


def test_salted_blocks_serve_their_salt_alone() -> None:
    run = driver()
    turn(run, 1, FIRST, cache_salt="a")
    evict(run, 10)
    assert turn(run, 2, FIRST) == 0
    assert turn(run, 3, FIRST, cache_salt="a") == 20


def test_all_ranks_must_confirm() -> None:
    run = driver()
    run.core._kv.offload_to(HOST, num_ranks=2)
    run.add(1, FIRST, 2)
    while run.live:
        run.send()
        run.deliver()
    run.send()
    (message,) = run.copies
    run.core.blocks_copied(BlocksCopied(1, message.number, [0]))
    assert run.core.stats().kv_blocks_used > 0
    for wrong in (
        BlocksCopied(1, message.number),
        BlocksCopied(0, message.number + 1),
        BlocksCopied(0, message.number, [len(message.copies)]),
    ):
        with pytest.raises(ValueError, match="not sent to it or are done"):
            run.core.blocks_copied(wrong)
    run.core.blocks_copied(BlocksCopied(0, message.number))
    (tier,) = run.core.stats().kv_tiers
    assert (tier.failed, tier.stored) == (1, len(message.copies) - 1)


def pair(
    layout: str = "full",
    slots: int = 30,
    media: Sequence[str] = (DISK,),
    roles: tuple[KVRole, KVRole] = ("kv_both", "kv_both"),
) -> tuple[CoreDriver, CoreDriver]:
    """Two engines that share a directory, or a store."""
    specs, sizes = LAYOUTS[layout]
    tiers = [TierSlots(medium, [slots] * len(specs)) for medium in media]
    first, second = (CoreDriver(specs, sizes, Limits(4, 8), tiers=tiers, role=role) for role in roles)
    second.worker.share_tiers(first.worker)
    return first, second


def computed(run: CoreDriver, number: int, prompt: list[int]) -> int:
    """The first token of a prompt whose blocks are stored for another engine when it ends."""
    run.add(number, prompt, 1, stores_prompt=True)
    run.run()
    (token,) = run.done[number].received
    return token


def answer(run: CoreDriver) -> None:
    """Answer the questions, and do no copies."""
    for place in reversed(range(len(run.copies))):
        if isinstance(run.copies[place], FindBlocks):
            run.copy(place)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_another_engine_goes_on_with_a_stored_prompt(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "_LEAST_BLOCKS", 1)
    first, second = pair(layout)
    token = computed(first, 1, FIRST)
    second.add(1, [*FIRST, token], 5, prompt_length=len(FIRST))
    second.run()
    # The state after a whole prompt would be saved by a step after it, and there is none.
    found = len(FIRST) if STATE not in LAYOUTS[layout][0] else len(FIRST) - 4
    assert second.core.stats().prefix_hits == second.core.stats().kv_tiers[0].hits == found
    assert turn(second, 2, OTHER) == 0


def test_roles_of_two_servers() -> None:
    """A router sends each prompt to the first with max_tokens 1, then to the second with the same."""
    first, second = pair(roles=("kv_producer", "kv_consumer"))
    first.add(1, FIRST, 1)
    first.run()
    stored = first.core.stats().kv_tiers[0].stored
    assert stored >= len(FIRST) // 4 and first.done[1].received
    second.add(1, FIRST, 5)
    second.run()
    assert second.core.stats().kv_tiers[0].hits == len(FIRST) - 4  # the last token is computed
    # The second stores nothing, and the first does not load.
    assert second.core.stats().kv_tiers[0].stored == 0
    first.core.reset_prefix_cache()
    assert turn(first, 2, FIRST) == 0 and first.core.stats().kv_tiers[0].loaded == 0


def test_engines_with_a_disk_and_a_store_find_blocks_in_the_store() -> None:
    first, second = pair(media=(DISK, REMOTE))
    token = computed(first, 1, FIRST)
    second.add(1, [*FIRST, token], 5, prompt_length=len(FIRST))
    second.run()
    disk, remote = second.core.stats().kv_tiers
    assert (disk.hits, remote.hits) == (0, len(FIRST))


def test_blocks_are_stored_while_a_long_prompt_is_computed() -> None:
    first, _ = pair()
    first.add(1, FIRST + OTHER[:4], 1, stores_prompt=True)
    assert not first.send()
    first.copy()  # the answer to its question
    while not first.copies:
        first.send()
        first.deliver()
    assert first.core.num_live == 1 and not first.live[1].received
    first.run()
    assert first.core.stats().kv_tiers[0].stored == 7


def test_a_short_prompt_does_not_wait_for_the_blocks_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_stores, "_PUSHED_BLOCKS", 1)
    monkeypatch.setattr(tier_stores, "_TURN_BLOCKS", 1)
    first, _ = pair()
    first.add(1, FIRST, 1, stores_prompt=True)
    first.add(2, OTHER[:8], 1, stores_prompt=True)
    while 2 in first.live:
        answer(first)
        while len(first.results) < MAX_IN_FLIGHT and first.send():
            pass
        if first.results:
            first.deliver()
        elif first.copies:
            first.copy()
    (end,) = first.core._stored_ends._ends
    assert end.request.request_id == 1 and end.request.blocks.shared_store.num_left >= 2
    first.run()
    assert first.core.stats().kv_tiers[0].stored == len(FIRST) // 4 + 2


def test_what_a_handover_waits_for_is_stored_before_the_blocks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_stores, "_STORED_BLOCKS", 1)
    first, _ = pair()
    for number, stores in ((1, False), (2, True)):
        first.add(number, FIRST if stores else OTHER, 1, stores_prompt=stores)
        while number in first.live and not first.live[number].received:
            answer(first)
            if first.send():
                first.deliver()
    first.send()
    assert first.core.num_live == 0 and 2 in first.live  # only copies are left
    while 2 in first.live:
        first.copy()
    assert first.core.stats().kv_tiers[0].stored <= 1 + len(FIRST) // 4
    first.run()


def test_a_load_comes_in_messages_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_transfers, "_MESSAGE_BYTES", 2)
    first, second = pair()
    token = computed(first, 1, FIRST)
    second.add(1, [*FIRST, token], 5, prompt_length=len(FIRST))
    second.send()
    second.copy()  # the answer to its question
    second.send()
    loads = [message for message in second.copies if isinstance(message, CopyBlocks)]
    assert [(len(load.copies), load.part) for load in loads] == [(2, 0), (2, 1), (2, 2)]
    second.copy(1)
    assert second.core.stats().kv_tiers[0].loaded == 0
    second.run()
    assert second.core.stats().prefix_hits == len(FIRST)


def test_a_sequence_that_another_engine_has_begun_comes_first() -> None:
    run = driver(rows=1)
    run.add(1, FIRST, 4)
    assert run.send()
    run.add(2, OTHER, 4)
    run.add(3, [*FIRST[:5], 7], 4, prompt_length=5)
    run.deliver()
    while 3 in run.live:
        if not run.send() or len(run.results) == MAX_IN_FLIGHT:
            run.deliver()
    assert 2 in run.live
    run.run()


def test_an_end_waits_for_the_copies_and_not_for_ever() -> None:
    first, _ = pair()
    for number in (1, 2):
        first.add(number, [number, *FIRST], 1, stores_prompt=True)
        first.send()
        first.copy()  # the answer to its question
        while not first.live[number].received:
            first.send()
            first.deliver()
        first.send()
        assert number in first.live and first.core.num_live == 0
        if number == 1:
            while first.copies:
                first.copy()
        else:
            first.clock.now += LOAD_DEADLINE_S
            first.take_stored_ends()
        assert number not in first.live
    first.run()


def test_what_another_engine_has_removed_is_computed() -> None:
    first, second = pair()
    token = computed(first, 1, FIRST)
    second.add(1, [*FIRST, token], 5, prompt_length=len(FIRST))
    assert not second.send()
    second.copy()  # the answer to its question
    assert not second.send()
    (load,) = second.copies
    lost = load.copies[2].digest
    del second.worker._tiers[0, 0, lost]
    second.run()
    assert second.core.stats().prefix_hits == 8
    assert second.core.stats().kv_tiers[0].failed == 1


def shared_storm(seed: int, layout: str) -> Counter[str]:
    """Prompts on one engine, generation on the other; aborts, lost blocks, ends before all is stored."""
    chance = random.Random(seed)
    engines = pair(layout, chance.choice([3, 12, 40]))
    for number in range(24):
        prompt = [(chance.randrange(3) * 4 + index) % 8 for _ in range(7) for index in range(4)]
        prompt = prompt[: chance.randint(6, 28)]
        engines[0].add(number, prompt, 1, stores_prompt=True)
        for _ in range(chance.randrange(16)):
            run = chance.choice(engines)
            if chance.random() < 0.5 and len(run.results) < MAX_IN_FLIGHT:
                run.send()
            elif run.results and chance.random() < 0.7:
                run.deliver()
            elif run.copies:
                run.copy(chance.randrange(len(run.copies)), [0] if chance.random() < 0.05 else [])
        for done in [one for one in engines[0].done.values() if one.message.max_tokens == 1]:
            prompt = list(unpack_ids(done.message.prompt_ids))
            (identity,) = done.message.request_ids
            del engines[0].done[identity]
            target = engines[chance.random() < 0.9]
            target.add(
                100 + identity, prompt + done.received, chance.randint(2, 9), prompt_length=len(prompt)
            )
        if chance.random() < 0.1 and (live := sorted(engines[1].live)):
            engines[1].abort(chance.choice(live))
    for run in engines:
        run.run()
    (tier,) = engines[1].core.stats().kv_tiers
    return Counter(stored=tier.stored, loaded=tier.loaded, failed=tier.failed, hits=tier.hits)


def test_a_storm_over_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "_LEAST_BLOCKS", 1)
    totals: Counter[str] = Counter()
    for layout in LAYOUTS:
        for seed in range(5):
            totals += shared_storm(seed, layout)
    for case in ("stored", "loaded", "failed", "hits"):
        assert totals[case] > 0, f"no {case} in {totals}"


def storm(seed: int, layout: str) -> Counter[str]:
    """Requests with common prefixes, aborts, lost copies; returns what the tiers did."""
    chance = random.Random(seed)
    tiers = [TierSlots(medium, [chance.choice([3, 12, 40])]) for medium in (HOST_MEMORY, DISK)]
    run = driver(tiers[: chance.randint(1, 2)], layout, chance.randint(2, 5), chance.choice([3, 8, 64]))
    for number in range(32):
        prompt = [(chance.randrange(3) * 4 + index) % 8 for _ in range(7) for index in range(4)]
        salt = chance.choice(["", "", "a"])
        length, n = chance.randint(6, 28), chance.choice([1, 1, 3])
        run.add(10 * number, prompt[:length], chance.randint(1, 12), n=n, cache_salt=salt)
        for _ in range(chance.randrange(8)):
            kind = chance.randrange(4)
            if kind < 2 and len(run.results) < MAX_IN_FLIGHT:
                run.send_failing(lambda rows: rows[:1] if chance.random() < 0.02 else [])
            elif kind == 2 and run.results:
                run.deliver()
            elif run.copies:
                place = chance.randrange(len(run.copies))
                lost = [0] if chance.random() < 0.1 else []
                run.copy(place, lost)
        if chance.random() < 0.1 and run.live:
            run.abort(chance.choice(sorted(run.live)))
    run.run()
    counted: Counter[str] = Counter()
    for tier in run.core.stats().kv_tiers:
        counted += Counter(stored=tier.stored, loaded=tier.loaded, failed=tier.failed, hits=tier.hits)
    return counted + Counter(preemptions=run.core.stats().preemptions)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_storm_meets_every_case(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "_LEAST_BLOCKS", 1)
    totals: Counter[str] = Counter()
    for seed in range(6):
        totals += storm(seed, layout)
    for case in ("stored", "loaded", "failed", "hits", "preemptions"):
        assert totals[case] > 0, f"no {case} in {totals}"
