"""Arrivals, aborts, failures, late rows and preemptions: every request gets what it would have got alone."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, TierSlots
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from engine_core.kv_cache import state_checkpoints
from engine_core.requests.request import State
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.engine.core_driver import GREEDY, VOCABULARY, CoreDriver, Draft

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=6)
NARROW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=1)
STATE = RecurrentStateSpec(bytes_per_slot=1)
LAYOUTS: dict[str, tuple[list[KVSpec], list[int]]] = {
    "full": ([FULL], [14]),
    "window": ([WINDOW], [13]),
    "full and windows": ([FULL, WINDOW, NARROW], [15, 13, 12]),
    "state": ([STATE, FULL], [4, 14]),
    "states and windows": ([FULL, STATE, WINDOW, STATE], [15, 3, 13, 4]),
}
MAX_MODEL_LEN = 48
BUDGETS = (1, 3, 8, 64)
ACCEPTANCE = (0.0, 0.5, 0.9, 1.0)

Choose = Callable[[list[int]], list[int]]
SALTS = ("", "a", "b")
BLOCKS = ([1, 2, 3, 4], [5, 6, 7, 0])


def shared_prompt(pattern: int, length: int) -> list[int]:
    """Block i is one of two, as bit i of the pattern says: prompts have equal prefixes and equal middles."""
    blocks = [BLOCKS[pattern >> index & 1] for index in range(-(-length // 4))]
    return [token_id for block in blocks for token_id in block][:length]


def fields_of(logprobs: int, prompt_logprobs: int, salt: str) -> dict[str, Any]:
    """Fields of a request."""
    sampling = msgspec.structs.replace(GREEDY, logprobs=logprobs)
    return {"sampling": sampling, "prompt_logprobs": prompt_logprobs, "cache_salt": salt}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a single block are ended to save a state."""
    monkeypatch.setattr(state_checkpoints, "_LEAST_BLOCKS", 1)


METHODS: list[Any] = [None, "ngram", "mtp", "draft_model", "suffix", "dflash", "eagle3", "dspark"]
"""By the drafts of each row: what drafts, so that every interface to the core is met."""


def drafting(chance: random.Random) -> Draft:
    """Proposals of random length, of which a random number is accepted; how many differs from run to run."""
    share = chance.choice(ACCEPTANCE)

    def draft(most: int) -> tuple[int, int]:
        proposed = chance.choice([0, most, chance.randint(0, most)])
        return proposed, next((n for n in range(proposed) if chance.random() >= share), proposed)

    return draft


def tiers_of(sizes: list[int], specs: list[KVSpec]) -> list[TierSlots]:
    """A tier for each number of slots of each group."""
    media = (HOST_MEMORY, DISK)
    return [TierSlots(medium, [size] * len(specs)) for medium, size in zip(media, sizes, strict=False)]


def limits_of(rows: int, budget: int, policy: str, num_drafts: int) -> Limits:
    """A step has room for the drafts of all rows. Odd budgets limit prompts more."""
    decodes = rows * (1 + num_drafts)
    budget = max(budget, decodes) if num_drafts else budget
    mixed, longest = (min(budget, decodes), budget // 2) if budget % 2 else (0, 0)
    speculative = SpeculativeConfig(METHODS[num_drafts], num_drafts)
    return Limits(
        rows,
        budget,
        policy,
        num_drafts=num_drafts,
        max_num_mixed_tokens=mixed,
        long_prefill_token_threshold=longest,
        fair_share=bool(budget % 2),
        adapts_width=rows % 2 == 0,
        lookahead=speculative.lookahead,
        sends_next_ids=speculative.reads_next_ids,
    )


class Storm(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        policy=st.sampled_from(["fcfs", "priority"]),
        rows=st.integers(1, 6),
        budget=st.sampled_from(BUDGETS),
        caching=st.booleans(),
        num_drafts=st.integers(0, len(METHODS) - 1),
        chance=st.randoms(use_true_random=False),
        tiers=st.lists(st.sampled_from([1, 4, 40]), max_size=2),
    )
    def start(
        self,
        layout: str,
        policy: str,
        rows: int,
        budget: int,
        caching: bool,
        num_drafts: int,
        chance: random.Random,
        tiers: list[int],
    ) -> None:
        specs, blocks = LAYOUTS[layout]
        limits = limits_of(rows, budget, policy, num_drafts)
        slots = tiers_of(tiers, specs) if caching else []
        self.driver = CoreDriver(specs, blocks, limits, MAX_MODEL_LEN, caching, drafting(chance), slots)
        self.arrivals = 0

    @rule(
        pattern=st.integers(0, 7),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 18),
        eos=st.lists(st.integers(0, VOCABULARY - 1), max_size=1),
        stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=1),
        priority=st.integers(-1, 1),
        frontend=st.sampled_from([b"a", b"b"]),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        fields=st.builds(fields_of, st.integers(-1, 2), st.integers(-1, 2), st.sampled_from(SALTS)),
    )
    def arrive(
        self,
        pattern: int,
        length: int,
        max_tokens: int,
        eos: list[int],
        stop: list[int],
        priority: int,
        frontend: bytes,
        n: int,
        fields: dict[str, Any],
    ) -> None:
        prompt, number = shared_prompt(pattern, length), self.arrivals
        assert self.driver.add(number, prompt, max_tokens, eos, stop, priority, frontend, n, **fields) == ""
        self.arrivals += n

    @rule(data=st.data())
    @precondition(lambda self: self.driver.live)
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.live))))

    @rule(frontend=st.sampled_from([b"a", b"b"]))
    def lose_frontend(self, frontend: bytes) -> None:
        self.driver.lose(frontend)

    @rule()
    @precondition(lambda self: len(self.driver.results) < MAX_IN_FLIGHT)
    def send(self) -> None:
        if not self.driver.send():
            runs = self.driver.results or self.driver.core.has_held or self.driver.copies
            assert runs or not self.driver.live, "requests wait, and nothing runs"

    @rule(data=st.data())
    @precondition(lambda self: len(self.driver.results) < MAX_IN_FLIGHT)
    def send_failing(self, data: st.DataObject) -> None:
        """Some rows of the step fail."""
        self.driver.send_failing(lambda rows: data.draw(st.lists(st.sampled_from(rows), unique=True)))

    @rule(data=st.data())
    @precondition(lambda self: len(self.driver.results) < MAX_IN_FLIGHT)
    def send_late(self, data: st.DataObject) -> None:
        """Some rows of the step are late."""
        self.driver.send_failing(
            lambda rows: [], lambda rows: data.draw(st.lists(st.sampled_from(rows), unique=True))
        )

    @rule()
    def die(self) -> None:
        """The engine ends; its requests go on at a new one."""
        self.driver.die()

    @rule(seconds=st.sampled_from([0.06, 10.0]))
    def wait(self, seconds: float) -> None:
        self.driver.clock.now += seconds

    @rule()
    @precondition(lambda self: self.driver.results)
    def deliver(self) -> None:
        self.driver.deliver()

    @rule(data=st.data())
    @precondition(lambda self: self.driver.copies)
    def copy(self, data: st.DataObject) -> None:
        """A copy to or from a tier is done, in any order; some of its blocks may be lost."""
        place = data.draw(st.integers(0, len(self.driver.copies) - 1))
        indices = range(len(self.driver.copies[place].copies))
        self.driver.copy(place, data.draw(st.lists(st.sampled_from(indices), unique=True, max_size=1)))

    @rule()
    @precondition(lambda self: self.driver.core._kv._caching)
    def reset(self) -> None:
        self.driver.core.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def storm(seed: int, layout: str, policy: str, num_drafts: int = 0, dies: bool = False) -> Counter[str]:
    """One random run; returns the core's counters, and how many requests failed.

    With `dies` the engine ends now and then; the counters are those of the last one.
    """
    chance = random.Random(seed)
    specs, blocks = LAYOUTS[layout]
    limits = limits_of(chance.randint(2, 6), chance.choice(BUDGETS), policy, num_drafts)
    driver = CoreDriver(specs, blocks, limits, MAX_MODEL_LEN, draft=drafting(random.Random(seed)))
    for request_id in range(40):
        prompt = shared_prompt(chance.randrange(8), chance.randint(1, 30))
        ids = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(2))]
        priority, frontend = chance.randrange(3), chance.choice([b"a", b"b"])
        fields = fields_of(chance.randint(-1, 2), chance.choice([-1, -1, -1, 0, 2]), chance.choice(SALTS))
        driver.add(request_id, prompt, chance.randint(1, 18), ids, [], priority, frontend, **fields)
        for _ in range(chance.randrange(6)):
            if len(driver.results) < MAX_IN_FLIGHT and chance.random() < 0.7:
                driver.send_failing(*chosen(chance, failing=0.02, late=0.05 * (seed >= 12)))
                driver.clock.now += 0.03
            elif driver.results:
                driver.deliver()
        if chance.random() < 0.1 and driver.live:
            driver.abort(chance.choice(sorted(driver.live)))
        if dies and request_id < 35 and chance.random() < 0.1:
            driver.die()
    driver.run()
    stats = driver.core.stats()
    counters = Counter({name: value for name, value in msgspec.structs.asdict(stats).items() if value})
    counters["num_accepted_tokens"] = sum(counters.pop("num_accepted_tokens_per_pos", []))
    return counters + Counter(failed=len(driver.failed), late=driver.num_late)


def chosen(chance: random.Random, failing: float, late: float) -> tuple[Choose, Choose]:
    """Choose rows with these chances."""

    def choose(share: float) -> Choose:
        return lambda rows: [row for row in rows if share and chance.random() < share]

    return choose(failing), choose(late)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_storm_meets_every_case(layout: str, policy: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(16):
        totals += storm(seed, layout, policy)
    for case in ("preemptions", "prefill_preemptions", "chunked_prefills", "overlapped_steps", "late"):
        assert totals[case] > 0, f"no {case} in {totals}"
    assert totals["prefix_hits"] > 0
    assert totals["generated_tokens"] > 1000


@pytest.mark.parametrize("num_drafts", [1, 7])
@pytest.mark.parametrize("layout", ["full", "full and windows", "states and windows"])
def test_storm_of_drafts_meets_every_case(layout: str, num_drafts: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(16):
        totals += storm(seed, layout, ["fcfs", "priority"][seed % 2], num_drafts, dies=seed % 4 == 3)
    for case in ("preemptions", "chunked_prefills", "overlapped_steps", "prefix_hits", "failed", "late"):
        assert totals[case] > 0, f"no {case} in {totals}"
    assert totals["generated_tokens"] > 1000
    assert totals["num_drafts"] < totals["num_draft_tokens"] + 1
    assert 100 < totals["num_accepted_tokens"] < totals["num_draft_tokens"]


@pytest.mark.parametrize(
    ("layout", "num_drafts"), [*((layout, 0) for layout in sorted(LAYOUTS)), ("full and windows", 3)]
)
def test_a_thousand_requests_aborted_anywhere_leave_nothing(layout: str, num_drafts: int) -> None:
    chance = random.Random(layout)
    specs, blocks = LAYOUTS[layout]
    limits = limits_of(6, 8, "fcfs", num_drafts)
    driver = CoreDriver(specs, blocks, limits, MAX_MODEL_LEN, draft=drafting(chance))
    aborted: Counter[State] = Counter()
    for request_id in range(1000):
        fields = fields_of(chance.randint(-1, 1), chance.randint(-1, 1), chance.choice(SALTS))
        prompt = shared_prompt(chance.randrange(8), chance.randint(1, 30))
        driver.add(request_id, prompt, chance.randint(1, 18), frontend=chance.choice([b"a", b"b"]), **fields)
        for _ in range(chance.randrange(12)):
            if len(driver.results) < MAX_IN_FLIGHT and chance.random() < 0.7:
                driver.send_failing(*chosen(chance, failing=0.0, late=0.05))
                driver.clock.now += 0.03
            elif driver.results:
                driver.deliver()
        if driver.live and chance.random() < 0.8:
            victim = chance.choice(sorted(driver.live))
            aborted[driver.core._scheduler.requests[victim].state] += 1
            driver.abort(victim)
    driver.run()  # checks that no block is in use and no request is live
    driver.core.check_integrity()
    stats = driver.core.stats()
    assert min(aborted[state] for state in State if state is not State.ENDED) > 10, aborted
    assert len(driver.done) > 100 and aborted.total() + len(driver.done) == 1000
    assert (stats.running, stats.waiting) == (0, 0)


def storm_of_failures(seed: int, layout: str, num_drafts: int) -> CoreDriver:
    """A run whose steps often fail for some rows, with few prompts and several sequences of each."""
    chance = random.Random(seed)
    specs, blocks = LAYOUTS[layout]
    limits = limits_of(6, chance.choice([8, 64]), chance.choice(["fcfs", "priority"]), num_drafts)
    many = [4 * count for count in blocks]
    driver = CoreDriver(specs, many, limits, MAX_MODEL_LEN, draft=drafting(random.Random(seed)))
    for number in range(20):
        prompt = shared_prompt(chance.randrange(2), chance.randint(8, 30))
        driver.add(10 * number, prompt, chance.randint(1, 12), n=3, priority=chance.randrange(3))
        for _ in range(chance.randrange(8)):
            if len(driver.results) < MAX_IN_FLIGHT and chance.random() < 0.7:
                driver.send_failing(*chosen(chance, failing=0.1, late=0.05))
                driver.clock.now += 0.03
            elif driver.results:
                driver.deliver()
        if driver.live and chance.random() < 0.3:
            driver.abort(chance.choice(sorted(driver.live)))
    driver.run()
    return driver


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("layout", ["full", "window", "full and windows", "state"])
def test_requests_that_share_blocks_of_failed_steps_are_recomputed(layout: str, num_drafts: int) -> None:
    drivers = [storm_of_failures(seed, layout, num_drafts) for seed in range(8)]
    assert sum(driver.num_recomputed for driver in drivers) > 5
    assert sum(len(driver.failed) for driver in drivers) > 10
