"""A lease keeps a prompt's blocks until all ranks have released it, or its time is over."""

import msgspec
import pytest

from atom.shared.messages.engine import pack_ids, unpack_ids
from atom.shared.messages.images import PromptImage
from atom.shared.messages.kv_peers import LEASE_SLOTS, EndLeases, LeasedBlocks, LeasesReleased
from atom.shared.messages.kv_tiers import PEER, CopyBlocks, TierSlots
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from atom.shared.utils.lease_seal import engine_name, is_sealed, with_statement
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.leases import LEASE_S, Leases
from engine_core.kv_tiers.request_tiers import PeerPrefix
from engine_core.requests.token_ids import Prompt, TokenIds
from tests.helpers.engine.core_driver import Clock

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=6)
STATE = RecurrentStateSpec(bytes_per_slot=1)
PROMPT = list(range(22))
RANKS = 2
SECRET = b"of this engine"


class Engine:
    """The cache of an engine that computes prompts."""

    def __init__(self, *specs: KVSpec, blocks: int = 12, seed: int = 7):
        self.clock = Clock()
        self.kv = KVCacheManager(specs, [blocks] * len(specs), 32, seed=seed)
        self.kv.lease_to("ipc://kv", RANKS, SECRET, self.clock)
        assert self.kv.leases is not None
        self.leases: Leases = self.kv.leases
        self._step = 0

    def compute(self, prompt: list[int], confirm: bool = True) -> RequestBlocks:
        """A request with all blocks cached, which has ended."""
        blocks = self.kv.new_blocks(TokenIds(Prompt(pack_ids(prompt))))
        self.kv.begin_iteration()
        hits = self.kv.find_prefix(blocks)
        assert hits is not None and self.kv.admit(blocks, hits)
        assert self.kv.extend(blocks, hits * 4, len(prompt)) is not None
        self._step += 1
        self.kv.cache(blocks, len(prompt), self._step)
        if confirm:
            self.kv.confirm(self._step)
        self.kv.free(blocks)
        return blocks

    def grant(self, prompt: list[int] | None = None) -> LeasedBlocks:
        leased = self.leases.grant(self.compute(prompt or PROMPT))
        assert leased is not None
        return leased

    def release(self, leased: LeasedBlocks, *ranks: int, generation: int | None = None) -> None:
        number = leased.lease.generation if generation is None else generation
        for rank in ranks:
            self.kv.end_leases(LeasesReleased(rank, [(leased.lease.slot, number)]))

    def check(self, num_used: int) -> None:
        for _ in self.kv.check_integrity([]):
            pass
        assert self.kv.num_used == num_used


def test_blocks_are_kept_until_all_ranks_have_released_them() -> None:
    engine = Engine(FULL)
    leased = engine.grant()
    assert leased.length == 5 and len(unpack_ids(leased.tables[0])) == 5
    engine.check(5)
    engine.release(leased, 1, 1)
    engine.check(5)
    engine.release(leased, 0, generation=1)
    engine.check(5)
    assert engine.leases.take_messages() == []
    engine.release(leased, 0)
    engine.check(0)
    assert engine.leases.take_messages() == [EndLeases([leased.lease.slot])]
    assert engine.leases.take_messages() == [] and engine.leases.num_ended_early == 0
    engine.release(leased, 0)  # it has ended


def test_a_window_keeps_its_last_blocks() -> None:
    engine = Engine(FULL, WINDOW)
    leased = engine.grant()
    assert [len(unpack_ids(table)) for table in leased.tables] == [5, 2]
    blocks = engine.compute(PROMPT)
    prefix = PeerPrefix(leased, blocks.tokens, 4)
    digests, _ = blocks.hashes(0, 5)
    prefix.note(0, digests)
    assert prefix.find(0, digests[0]) == unpack_ids(leased.tables[0])[0]
    assert prefix.find(1, digests[2]) is None and prefix.find(2, digests[4]) is None
    assert prefix.find(1, digests[4]) == unpack_ids(leased.tables[1])[1]
    prefix.drop()
    assert prefix.find(0, digests[0]) is None


def test_other_tokens_are_not_found() -> None:
    engine = Engine(FULL, blocks=20)
    leased = engine.grant()
    digests, _ = engine.compute(PROMPT).hashes(0, 5)
    for prompt, salt, is_found in (
        (PROMPT, "", True),
        ([*PROMPT[:20], 98], "", True),
        ([*PROMPT[:19], 99, 98], "", False),
        (PROMPT[:19], "", False),
        (PROMPT, "of a tenant", False),
    ):
        prefix = PeerPrefix(leased, TokenIds(Prompt(pack_ids(prompt), salt)), 4)
        prefix.note(0, digests)
        assert (prefix.find(0, digests[0]) is not None) is is_found


def test_images_are_part_of_the_content() -> None:
    def content(*images: PromptImage) -> bytes:
        return TokenIds(Prompt(pack_ids(PROMPT), images=images)).content(20)

    image = PromptImage(b"k" * 16, 4, 2, 4, b"")
    later = PromptImage(b"k" * 16, 20, 1, 2, b"")
    other = PromptImage(b"l" * 16, 4, 2, 4, b"")
    moved = PromptImage(b"k" * 16, 5, 2, 4, b"")
    turned = PromptImage(b"k" * 16, 4, 4, 2, b"")
    assert content(image, later) == content(image)
    assert len({content(), content(image), content(other), content(moved), content(turned)}) == 5


def test_a_lease_is_sealed_for_its_blocks_alone() -> None:
    leased = Engine(FULL).grant()
    lease = with_statement(leased)
    assert lease.engine == engine_name(SECRET) and is_sealed(lease, SECRET)
    assert not is_sealed(lease, b"of another engine")
    blocks = [*unpack_ids(leased.tables[0])]
    forged = (
        msgspec.structs.replace(leased, tables=[pack_ids([*blocks[:-1], 0])]),
        msgspec.structs.replace(leased, length=4),
        msgspec.structs.replace(leased, content=bytes(32)),
        msgspec.structs.replace(leased, lease=msgspec.structs.replace(leased.lease, slot=9)),
        msgspec.structs.replace(leased, lease=msgspec.structs.replace(leased.lease, generation=1)),
    )
    assert not any(is_sealed(with_statement(each), SECRET) for each in forged)


def test_without_a_saved_state_nothing_is_kept() -> None:
    engine = Engine(FULL, STATE)
    assert engine.leases.grant(engine.compute(PROMPT)) is None
    engine.check(0)


def test_nothing_is_kept_of_a_short_prompt_or_a_step_in_flight() -> None:
    engine = Engine(FULL)
    assert engine.leases.grant(engine.compute(PROMPT[:3])) is None
    assert engine.leases.grant(engine.compute(PROMPT, confirm=False)) is None
    engine.check(0)


def test_a_lease_ends_by_its_deadline() -> None:
    engine = Engine(FULL)
    leased = engine.grant()
    engine.clock.now += LEASE_S / 2
    later = engine.grant([*PROMPT[:4], *PROMPT])
    engine.clock.now += LEASE_S / 2
    assert engine.leases.is_overdue
    engine.kv.end_leases()
    assert len(engine.leases) == 1 and engine.leases.num_ended_early == 1 and not engine.leases.is_overdue
    engine.release(leased, 0, 1)
    engine.check(6)
    engine.release(later, 0, 1)
    engine.check(0)


def test_a_lease_is_shorter_while_a_prompt_waits_for_room() -> None:
    engine = Engine(FULL)
    engine.grant()
    engine.clock.now += LEASE_S / 4
    waiting = engine.kv.new_blocks(TokenIds(Prompt(pack_ids([9] * 40))))
    assert engine.kv.find_prefix(waiting) == 0 and not engine.leases.is_overdue
    assert not engine.kv.admit(waiting, 0) and engine.leases.is_overdue
    before = engine.kv.num_frees
    engine.kv.end_leases()
    assert engine.kv.num_frees > before and engine.kv.admit(waiting, 0) and not engine.leases.is_wanted
    engine.kv.free(waiting)
    engine.check(0)


def test_a_running_request_ends_the_oldest_lease() -> None:
    engine = Engine(FULL, blocks=16)
    first = engine.grant()
    second = engine.grant([7, *PROMPT])
    blocks = engine.kv.new_blocks(TokenIds(Prompt(pack_ids([9] * 40))))
    assert engine.kv.extend(blocks, 0, 40) is not None
    assert engine.leases.take_messages() == [EndLeases([first.lease.slot])]
    assert engine.kv.extend(blocks, 40, 80) is None  # not even without leases
    assert engine.leases.take_messages() == [EndLeases([second.lease.slot])]
    engine.kv.free(blocks)
    engine.check(0)


def test_slots_are_used_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FULL)
    engine.leases._free_slots.rotate(-(LEASE_SLOTS - 1))
    first = engine.grant()
    while len(engine.leases._free_slots) > 1:
        engine.leases._free_slots.popleft()
    second = engine.grant()
    assert engine.leases.grant(engine.compute(PROMPT)) is None  # no slot is free
    engine.release(first, 0, 1)
    third = engine.grant()
    assert (third.lease.slot, third.lease.generation) == (first.lease.slot, 1)
    engine.release(second, 0, 1)
    engine.release(third, 0, 1)
    engine.check(0)


def test_a_reset_cache_keeps_what_is_leased() -> None:
    engine = Engine(FULL)
    leased = engine.grant()
    engine.kv.reset([])
    engine.check(5)
    engine.release(leased, 0, 1)
    engine.check(0)


@pytest.mark.parametrize("spec", [FULL, WINDOW])
def test_a_reader_asks_for_the_blocks_that_it_lacks(spec: KVSpec) -> None:
    engine, reader = Engine(spec), Engine(spec, seed=8)  # as those of another server
    leased = engine.grant()
    reader.kv.offload_to([TierSlots(PEER, [])], num_ranks=RANKS)
    assert reader.kv.offload is not None
    loads = reader.kv.offload.loads
    blocks = reader.kv.new_blocks(TokenIds(Prompt(pack_ids([*PROMPT, 5]))))
    blocks.lookup.peer = PeerPrefix(leased, blocks.tokens, 4)
    reader.kv.begin_iteration()
    assert reader.kv.find_prefix(blocks) == 0 and loads.look_up(blocks)
    assert loads.wait_for(blocks, 0, now=0.0) is not None
    (message,) = reader.kv.offload.take_messages()
    assert isinstance(message, CopyBlocks) and message.lease == with_statement(leased)
    assert [copy.slot for copy in message.copies] == list(unpack_ids(leased.tables[0]))
    reader.kv.leave_peer(blocks)
    reader.kv.leave_peer(blocks)
    (release,) = reader.kv.offload.take_messages()
    assert getattr(release, "lease", None) == with_statement(leased)


def test_a_reader_that_has_the_blocks_of_one_group_asks_for_those_of_another() -> None:
    engine, reader = Engine(FULL, WINDOW), Engine(FULL, WINDOW, seed=8)
    leased = engine.grant()
    reader.kv.offload_to([TierSlots(PEER, [])], num_ranks=RANKS)
    assert reader.kv.offload is not None
    reader.compute(PROMPT)
    reader.kv.pools[1].reset()  # as if others had taken them
    blocks = reader.kv.new_blocks(TokenIds(Prompt(pack_ids([*PROMPT, 5]))))
    blocks.lookup.peer = PeerPrefix(leased, blocks.tokens, 4)
    reader.kv.begin_iteration()
    assert reader.kv.find_prefix(blocks) == 0 and reader.kv.offload.loads.look_up(blocks)
    assert reader.kv.offload.loads.wait_for(blocks, 0, now=0.0) is not None
    (message,) = reader.kv.offload.take_messages()
    assert isinstance(message, CopyBlocks)
    wanted = [(1, number) for number in unpack_ids(leased.tables[1])]
    assert [(copy.group, copy.slot) for copy in message.copies] == wanted
