"""A prompt of one engine, read from its cache by another: the ids of one engine, and nothing stays in use.

Blocks that no request and no lease uses hold NaN, so that reading one changes the output.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.kv_peers import Lease, LeasedBlocks
from atom.shared.messages.kv_tiers import PEER, TierSlots
from engine_core.kv_tiers.leases import LEASE_S
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.fake_nixl import FakeNixl
from tests.helpers.engine.until import until
from tests.helpers.engine.whole_engine import WholeEngine
from workers.memory import peer_tier
from workers.worker import Worker

MODELS = {"llama-gqa": 1, "deepseek-v3.2": 1, "gpt-oss": 2, "qwen3-next": 2}
COUNT = 6
PEERS = [TierSlots(PEER, [])]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    return FakeNixl(monkeypatch)


class Pair:
    """An engine for prompts, and one that generates."""

    def __init__(
        self, checkpoint: Checkpoint, num_groups: int, directory: Path, of_prompts: Checkpoint | None = None
    ):
        self._workers = [
            Worker(engine_config(), each, place(), lambda *progress: None)
            for each in (of_prompts or checkpoint, checkpoint)
        ]
        blocks = [18] * num_groups
        self.prefill = WholeEngine(self._workers[0], blocks, lease_address=f"ipc://{directory}/kv")
        self.decode = WholeEngine(self._workers[1], blocks, tiers=PEERS)
        self._last = 0

    def leased(self, prompt: list[int]) -> tuple[int, LeasedBlocks | None]:
        """The first id, and what the engine keeps of the prompt."""
        self._last += 1
        self.prefill.add(self._last, prompt, 1, stores_prompt=True)
        self.prefill.run()
        output = self.prefill.outputs[self._last]
        assert len(output.token_ids) == 1 and not output.error
        return output.token_ids[0], output.leased

    def rest(self, prompt: list[int], first: int, leased: LeasedBlocks | None) -> list[int]:
        """All ids, of which the other engine computes those after the first."""
        self.decode.add(self._last, [*prompt, first], COUNT, prompt_length=len(prompt), leased=leased)
        self.decode.run()
        return [first, *self.decode.outputs[self._last].token_ids]

    def run(self, prompt: list[int]) -> list[int]:
        return self.rest(prompt, *self.leased(prompt))

    def loaded(self) -> int:
        return self.decode.core.stats().kv_tiers[0].loaded

    def until_free(self) -> None:
        """The engine for prompts hears that nothing is needed any more."""
        leases = self.prefill.kv.leases
        assert leases is not None

        def is_free() -> bool | None:
            self.decode._copy()
            self.prefill._copy()
            return True if not leases else None

        until(is_free)
        self.prefill.kv.begin_iteration()
        assert self.prefill.kv.num_used == 0
        self.prefill.core.check_integrity()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


@pytest.fixture(params=["llama-gqa"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    name: str = request.param
    _, checkpoint = save_tiny(tiny(name), tmp_path / "model")
    made = Pair(checkpoint, MODELS[name], tmp_path)
    yield made
    made.close()


def expected(pair: Pair, prompt: list[int]) -> list[int]:
    """The ids of one engine, which has nothing in its cache."""
    alone = pair.prefill
    alone.core.reset_prefix_cache()
    alone.add(999, prompt, COUNT)
    alone.run()
    alone.core.reset_prefix_cache()
    return alone.outputs.pop(999).token_ids


@pytest.mark.parametrize("pair", sorted(MODELS), indirect=True)
def test_ids_are_those_of_one_engine(pair: Pair, fake: FakeNixl) -> None:
    prompts = [prompt_of(length, length) for length in (9, 33, 40, 33)]
    for prompt in prompts:
        ids = expected(pair, prompt)
        assert pair.run(prompt) == ids
        pair.until_free()
        pair.decode.core.reset_prefix_cache()
    assert pair.loaded() > 0 and pair.decode.core.stats().kv_tiers[0].failed == 0 < fake.num_reads


def test_what_the_reader_has_is_not_read(pair: Pair, fake: FakeNixl) -> None:
    prompt = prompt_of(40, 1)
    first = pair.run(prompt)
    reads = fake.num_reads
    assert pair.run(prompt) == first and fake.num_reads == reads
    pair.until_free()


def test_blocks_of_other_weights_are_computed(
    tmp_path: Path, fake: FakeNixl, caplog: pytest.LogCaptureFixture
) -> None:
    _, own = save_tiny(tiny("llama-gqa"), tmp_path / "model")
    _, other = save_tiny(tiny("llama-gqa"), tmp_path / "other")
    (weights,) = (tmp_path / "other").glob("*.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 1
    weights.write_bytes(damaged)
    pair = Pair(own, 1, tmp_path, other)
    prompt = prompt_of(40, 11)
    first, leased = pair.leased(prompt)
    assert leased is not None
    with caplog.at_level(logging.WARNING):
        pair.rest(prompt, first, leased)
    assert pair.loaded() == 0 == fake.num_reads
    assert "fingerprint of version, model and settings is" in caplog.text
    pair.close()


def test_a_failed_read_is_computed(pair: Pair, fake: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(40, 2)
    ids = expected(pair, prompt)
    fake.is_cut = True
    assert pair.run(prompt) == ids
    stats = pair.decode.core.stats().kv_tiers[0]
    assert stats.loaded == 0 < stats.failed
    pair.decode.core.check_integrity()


def test_a_late_read_is_computed(pair: Pair, fake: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "_READ_S", 0.05)
    prompt = prompt_of(40, 3)
    ids = expected(pair, prompt)
    fake.is_stuck = True
    assert pair.run(prompt) == ids and pair.loaded() == 0
    fake.is_stuck = False


def test_an_engine_that_has_ended_is_computed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "_ASK_S", 0.1)
    prompt = prompt_of(40, 4)
    ids = expected(pair, prompt)
    first, leased = pair.leased(prompt)
    assert leased is not None
    gone = LeasedBlocks(Lease("ipc:///nowhere", 0, 0), leased.length, leased.content, leased.tables)
    assert pair.rest(prompt, first, gone) == ids and pair.loaded() == 0


def test_a_lease_of_other_tokens_is_not_used(pair: Pair, fake: FakeNixl) -> None:
    prompt, other = prompt_of(40, 5), prompt_of(40, 6)
    ids = expected(pair, prompt)
    first, _ = pair.leased(prompt)
    pair.decode.core.reset_prefix_cache()
    assert pair.prefill.kv.leases is not None
    pair.prefill.kv._free_tables(
        [*map(list, pair.prefill.kv.leases.end_oldest() or ())]
    )  # room for the other
    _, leased = pair.leased(other)
    assert leased is not None and pair.rest(prompt, first, leased) == ids and fake.num_reads == 0


def test_a_lease_that_is_too_old_is_a_miss(pair: Pair) -> None:
    prompt = prompt_of(40, 7)
    ids = expected(pair, prompt)
    leases = pair.prefill.kv.leases
    assert leases is not None
    first, leased = pair.leased(prompt)
    for granted in leases._granted.values():
        granted.at -= 2 * LEASE_S
    pair.prefill._copy()
    assert not leases and leases.num_ended_early == 1
    assert pair.rest(prompt, first, leased) == ids and pair.loaded() == 0


def test_a_running_request_gets_the_blocks_of_leases(pair: Pair) -> None:
    """The readers find that their leases have ended, though the blocks have new contents."""
    prompt = prompt_of(40, 8)
    ids = expected(pair, prompt)
    first, leased = pair.leased(prompt)
    num_free = pair.prefill.kv.pools[0].num_free
    longest = pair.prefill.kv.block_size * num_free
    pair.prefill.add(500, prompt_of(longest - 4, 9), 8)
    pair.prefill.run()
    assert pair.prefill.kv.leases is not None and pair.prefill.kv.leases.num_ended_early == 1
    assert pair.rest(prompt, first, leased) == ids and pair.loaded() == 0


def test_a_request_that_ends_while_it_waits_lets_go(pair: Pair, fake: FakeNixl) -> None:
    prompt = prompt_of(40, 10)
    first, leased = pair.leased(prompt)
    fake.is_stuck = True
    pair.decode.add(77, [*prompt, first], COUNT, prompt_length=len(prompt), leased=leased)
    assert not pair.decode._send() and pair.decode.core._scheduler.requests[77].blocks.lookup.peer
    pair.decode.core.abort([77])
    fake.is_stuck = False
    pair.decode.finish_copies()
    pair.until_free()
