"""The router: its policies, ranks that are gone, and the bound of the imbalance."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from atom.shared.config.cache import CacheConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import pack_ids
from frontend.engine_client.dp_router import Charge, DPRouter, Policy, RoutedPrompt, router_for

BLOCK = 4
ALL = (0, 1, 2)


def router(policy: Policy, ranks: int = 3, first_rank: int = 0) -> DPRouter:
    return DPRouter(policy, ranks, BLOCK, first_rank)


def prompt(ids: Sequence[int], max_tokens: int = 10, n: int = 1, salt: str = "") -> RoutedPrompt:
    return RoutedPrompt(pack_ids(ids), max_tokens, n, salt)


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def ranks_of(router: DPRouter, prompts: Sequence[RoutedPrompt], ready: Sequence[int] = ALL) -> list[int]:
    return [router.route(each, ready).rank for each in prompts]


def test_round_robin_takes_turns_and_skips_ranks_that_are_not_ready() -> None:
    made = router("round_robin", first_rank=1)
    assert ranks_of(made, [prompt([1])] * 4) == [1, 2, 0, 1]
    assert ranks_of(made, [prompt([1])] * 3, ready=[0, 1]) == [0, 1, 0]
    assert ranks_of(made, [prompt([1])] * 3) == [1, 2, 0]


def test_least_requests_counts_sequences_then_tokens() -> None:
    made = router("least_requests")
    assert made.route(prompt([1], n=3), ALL).rank == 0
    long, short = made.route(prompt(range(90)), ALL), made.route(prompt([1]), ALL)
    assert (long.rank, short.rank) == (1, 2)
    assert made.route(prompt([1]), ALL).rank == 2  # as many sequences as rank 1, and fewer tokens
    made.release(long)
    assert made.route(prompt([1]), ALL).rank == 1


def test_least_tokens_counts_prompts_and_expected_output() -> None:
    made = router("least_tokens")
    assert made.route(prompt(range(100), max_tokens=10), ALL) == Charge(0, 110)
    assert made.route(prompt([1], max_tokens=100_000), ALL) == Charge(1, 1 + 512)
    assert made.route(prompt(range(10), max_tokens=5, n=4), ALL) == Charge(2, 3 + 5)
    assert [made.load(rank) for rank in ALL] == [(1, 110), (1, 513), (4, 32)]
    assert made.route(prompt([1]), ALL).rank == 2


@pytest.mark.parametrize("policy", ["least_requests", "least_tokens", "prefix"])
def test_charges_are_released_exactly(policy: Policy) -> None:
    made, generator = router(policy), random.Random(1)
    open_charges: list[Charge] = []
    for number in range(500):
        n = generator.randint(1, 4)
        routed = prompt(random_prompt(generator.randint(1, 60), number % 7), generator.randint(1, 900), n)
        open_charges += [made.route(routed, generator.sample(ALL, generator.randint(1, 3)))] * n
        while len(open_charges) > generator.randint(0, 20):
            made.release(open_charges.pop(generator.randrange(len(open_charges))))
        expected = Counter(charge.rank for charge in open_charges)
        tokens = Counter[int]()
        for charge in open_charges:
            tokens[charge.rank] += charge.tokens
        assert [made.load(rank) for rank in ALL] == [(expected[rank], tokens[rank]) for rank in ALL]


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "least_tokens", "prefix"])
def test_equal_requests_are_spread_evenly(policy: Policy) -> None:
    made = router(policy)
    ranks = ranks_of(made, [prompt(random_prompt(20, seed)) for seed in range(300)])
    assert Counter(ranks) == dict.fromkeys(ALL, 100)


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "least_tokens", "prefix"])
def test_only_ready_ranks_are_chosen(policy: Policy) -> None:
    made = router(policy)
    ids = random_prompt(64, 0)
    holder = made.route(prompt(ids), ALL).rank
    others = [rank for rank in ALL if rank != holder]
    assert holder not in ranks_of(made, [prompt(ids)] * 50, others)
    assert ranks_of(made, [prompt(ids)] * 5, [holder]) == [holder] * 5


def test_a_conversation_stays_on_its_rank() -> None:
    made = router("prefix")
    texts = {seed: random_prompt(40, seed) for seed in range(30)}
    ranks = {seed: made.route(prompt(text), ALL) for seed, text in texts.items()}
    for turn in range(6):
        for seed in texts:
            made.release(ranks[seed])
            texts[seed] += random_prompt(30, 100 * turn + seed)
            charge = made.route(prompt(texts[seed]), ALL)
            assert charge.rank == ranks[seed].rank
            ranks[seed] = charge


def test_a_hit_charges_only_what_is_left_to_compute() -> None:
    made = router("prefix")
    ids = random_prompt(41, 3)
    assert made.route(prompt(ids, max_tokens=1), ALL).tokens == 42
    assert made.route(prompt(ids, max_tokens=1), [0]).tokens == 41 - 40 + 1


def test_the_load_cap_spreads_a_prefix_that_all_requests_share() -> None:
    """No rank gets ahead of another by more than the prefix and one request."""
    made, shared = router("prefix"), random_prompt(400, 1)
    for seed in range(1000):
        made.route(prompt(shared + random_prompt(20, seed), max_tokens=30), ALL)
        loads = [made.load(rank)[1] for rank in ALL]
        assert max(loads) - min(loads) <= len(shared) + 50
    requests = [made.load(rank)[0] for rank in ALL]
    assert max(requests) - min(requests) <= 10


def test_a_full_rank_loses_a_short_prefix() -> None:
    made = router("prefix")
    ids = random_prompt(20, 1)
    holder = made.route(prompt(ids, max_tokens=100), ALL).rank
    assert made.route(prompt(ids, max_tokens=100), ALL).rank != holder
    assert made.route(prompt(random_prompt(2000, 2), max_tokens=1), [holder]).rank == holder


def test_a_new_life_has_nothing_computed() -> None:
    made = router("prefix")
    ids = random_prompt(200, 1)
    made.release(made.route(prompt(ids), [1]))
    assert made.route(prompt(ids), ALL).rank == 1
    made.forget(1)
    assert made.route(prompt(ids), [1]).tokens == 200 + 10


def test_prompts_of_different_salts_share_nothing() -> None:
    made = router("prefix")
    ids = random_prompt(100, 1)
    made.route(prompt(ids, salt="a"), [1])
    assert made.route(prompt(ids, salt="a"), [1]).tokens < 30
    assert made.route(prompt(ids, salt="b"), [1]).tokens == 110
    assert made.route(prompt(ids), [1]).tokens == 110


def test_what_was_routed_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import frontend.engine_client.dp_router as module

    monkeypatch.setattr(module, "_MAX_HASHES", 20)
    made = router("prefix")
    first = random_prompt(30, 0)
    made.release(made.route(prompt(first), [2]))
    assert made.route(prompt(first), [2]).tokens == 30 - 28 + 10
    for seed in range(1, 10):
        made.route(prompt(random_prompt(30, seed)), [0])
    assert made.route(prompt(first), [2]).tokens == 30 + 10
    assert len(made._prefixes._ranks) <= 20


def test_prefixes_of_a_very_long_prompt_are_few() -> None:
    made = DPRouter("prefix", 2, 16)
    lengths = made._prefixes._ends
    assert lengths[:6] == [0, 16, 32, 48, 64, 80] and lengths[-1] >= 1 << 18 and len(lengths) < 60
    assert all(low < high <= low * 1.25 + 16 for low, high in pairwise(lengths))


@pytest.mark.parametrize(("caching", "computed"), [(True, 88), (False, 0)])
def test_without_a_prefix_cache_no_prefix_is_expected(caching: bool, computed: int) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching))
    made = router_for(config, 2)
    ids = random_prompt(100, 1)
    made.route(prompt(ids), [0])
    assert made.route(prompt(ids), [0]).tokens == 110 - computed


def conversations(seed: int, count: int = 250, turns: int = 4) -> list[RoutedPrompt]:
    """Turns of many conversations in random order: prompts of some ten to some ten thousand tokens."""
    source = random.Random(seed)
    texts = [[source.randrange(50_000) for _ in range(_length(source, 16, 32_000))] for _ in range(count)]
    prompts = []
    for _ in range(turns):
        for text in source.sample(texts, count):
            prompts.append(prompt(text, max_tokens=_length(source, 1, 4096) // 3 + 1))
            text += source.choices(range(50_000), k=source.randrange(50, 400))
    return prompts


def _length(source: random.Random, least: int, most: int) -> int:
    return min(most, least + int(source.lognormvariate(6, 1.5)))


class RankCaches:
    """What the engines have computed, by whole blocks."""

    def __init__(self, ranks: int):
        self._known: list[set[tuple[bytes, int]]] = [set() for _ in range(ranks)]
        self.hits = self.total = 0

    def compute(self, rank: int, ids: bytes) -> None:
        known, step, hit = self._known[rank], 64 * 4, True
        for end in range(step, len(ids), step):
            key = (ids[:step] + ids[end - step : end], end)  # the text's beginning names its conversation
            hit = hit and key in known
            self.hits += hit
            self.total += 1
            known.add(key)


def imbalance(made: DPRouter, ranks: int) -> float:
    """The largest difference of a rank's tokens in flight to the mean of all, as a share of it."""
    tokens = [made.load(rank)[1] for rank in range(ranks)]
    mean = sum(tokens) / ranks
    return max(abs(each - mean) for each in tokens) / mean


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_requests_load_four_ranks_within_a_tenth(seed: int) -> None:
    """With prefixes, too, which double the hits; requests of 1,000 times different length."""
    rates: dict[Policy, float] = {}
    policies: tuple[Policy, ...] = ("least_tokens", "prefix")
    for policy in policies:
        made, caches = router(policy, ranks=4), RankCaches(4)
        for number, each in enumerate(conversations(seed), 1):
            caches.compute(made.route(each, range(4)).rank, each.ids)
            assert number < 500 or imbalance(made, 4) < 0.1
        assert imbalance(made, 4) < 0.02
        rates[policy] = caches.hits / caches.total
    assert rates["prefix"] > 2 * rates["least_tokens"]


def test_the_load_stays_even_while_requests_come_and_end() -> None:
    """256 in flight, each for as long as its output: the longest prompt is half of a rank's share."""
    made, source = router("prefix", ranks=4), random.Random(3)
    running: list[tuple[int, Charge]] = []
    found, now = [], 0
    for each in conversations(3):
        if len(running) == 256:
            now, ended = min(running, key=lambda one: one[0])
            running.remove((now, ended))
            made.release(ended)
            found.append(imbalance(made, 4))
        running.append((now + each.max_tokens + source.randrange(4), made.route(each, range(4))))
    assert sorted(found)[len(found) // 2] < 0.05 and sum(found) / len(found) < 0.1


def test_a_session_stays_where_its_context_is_unless_the_rank_has_too_much_to_do() -> None:
    made = router("prefix", ranks=2)

    def turn(length: int, seed: int, session: int = 9) -> Charge:
        asked = RoutedPrompt(pack_ids(random_prompt(length, seed)), 10, 1, "", session)
        return made.route(asked, (0, 1))

    first = turn(400, 1)
    assert first.stays is None
    made.release(first)
    again = turn(500, 2)  # another beginning: no prefix is known
    assert again == Charge(first.rank, 500 - 400 + 10, True)
    other = turn(400, 3, session=8)
    assert other.rank != first.rank and other.stays is None
    made.release(other)
    for _ in range(2):
        made.route(RoutedPrompt(pack_ids(random_prompt(400, 4)), 10), (first.rank,))
    moved = turn(500, 5)
    assert moved.rank == other.rank and moved.stays is False
    assert turn(500, 6).stays is True
    made.forget(moved.rank)
    assert turn(500, 7).stays is None
