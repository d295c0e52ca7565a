"""Which sequences run again after the end of an engine, in which order, and which ones fail."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from atom.shared.messages.engine import AddRequest, Sampling
from atom.shared.messages.supervisor import Trial, WantTrial
from atom.supervisor.trials import Trials
from frontend.engine_client.replay import Replays
from frontend.engine_client.sequence import RunningSequence
from frontend.engine_client.streams import Stream, StreamOptions
from frontend.engine_client.trial_turn import TrialTurn
from frontend.metrics.metrics import Progress
from frontend.text.output_processor import OutputProcessor, TextOptions

NUMBERS = itertools.count()


def case(tokens: int = 0, num: int = 1) -> list[RunningSequence]:
    """The sequences of a request that have as many tokens."""
    stream = Stream([], StreamOptions(), None)  # type: ignore[arg-type]
    request = AddRequest([0], b"", 10, Sampling(0.0, 0, 1.0, 0.0, 0))
    state = OutputProcessor(None).new_state(request, TextOptions())
    return [RunningSequence(next(NUMBERS), state, stream, Progress(0.0, 3, tokens), None) for _ in range(num)]


class Driven:
    """Replays with sequences that run as soon as they may, by their places, and those that failed."""

    def __init__(self, sequences: list[RunningSequence], most: int = 3, turn: TrialTurn | None = None):
        self.replays = Replays(most, turn=turn)
        self.all = list(sequences)
        self.running = list(range(len(sequences)))
        self.failed: list[int] = []
        self.life = 0

    def die(self, *others: RunningSequence) -> None:
        """The engine of all running sequences, and of others, ends."""
        for sequence in others:
            self.running.append(len(self.all))
            self.all.append(sequence)
        failed = self.replays.died([self.all[place] for place in self.running], 0, self.life)
        self.failed += map(self.all.index, failed)
        self.running = []
        self.life += 1
        for sequence in failed:
            self.replays.ended(sequence)
        self.send()

    def send(self) -> list[int]:
        """Send what is due."""
        found = self.replays.due(lambda sequence: self.all.index(sequence) not in self.running)
        for sequence in found:
            self.replays.sent(sequence, 20)
        places = list(map(self.all.index, found))
        self.running += places
        return places

    def advance(self, *places: int, tokens: int = 16) -> list[int]:
        """New tokens; returns what is sent then."""
        for place in places:
            self.all[place].progress.tokens += tokens
            self.replays.advanced(self.all[place])
        return self.send()


def test_the_guilty_request_is_found_and_fails_alone() -> None:
    """One of ten, found by trying groups; no other request counts a third death."""
    guilty = 7
    driven = Driven([case(20)[0] for _ in range(10)])
    driven.die()
    assert sorted(driven.running) == list(range(10))
    deaths = 1
    while guilty not in driven.failed:
        if guilty in driven.running:
            deaths += 1
            assert deaths < 8
            driven.die()
        else:
            assert driven.advance(*driven.running) != []
    assert driven.failed == [guilty] and deaths == 5  # two of all, groups of 4, 2 and 1
    while len(driven.running) < 9:
        assert driven.advance(*driven.running)
    assert max(each.deaths for each in driven.replays._cases.values()) == 2


def test_sequences_of_a_request_count_and_fail_together() -> None:
    driven = Driven(case(num=8))
    for _ in range(3):
        assert not driven.failed and len(driven.running) == 8
        driven.die()
    assert driven.failed == list(range(8)) and len(driven.replays) == 0


def test_a_new_request_next_to_a_tried_one_may_be_the_cause() -> None:
    """Neither of two tried ones fails for the third, which is suspected then, too."""
    driven = Driven([case(20)[0], case(20)[0]])
    driven.die()
    driven.die()
    assert list(driven.running) == [0]
    driven.die(new := case()[0])
    assert not driven.failed and sorted(driven.running) == [1, 2]
    driven.die()
    assert not driven.failed
    assert driven.replays._cases[new.stream].deaths == 2
    tried = list(driven.running)
    while 2 not in tried:
        tried = driven.advance(*tried)
    driven.die()
    assert driven.failed == [2]


def test_a_proven_request_counts_no_death_of_a_tried_one() -> None:
    driven = Driven([case(20)[0], case(20)[0]])
    driven.die()
    driven.die()
    (tried,) = driven.running
    old = case(100)[0]
    driven.die(old)
    assert driven.failed == [tried] and driven.replays._cases[old.stream].deaths == 0


class Frontends:
    """Frontends of one engine and one supervisor; each has its sequences."""

    def __init__(self, *frontends: list[RunningSequence]):
        self.trials = Trials()
        self.all: list[Driven] = []
        for index, sequences in enumerate(frontends):
            self.all.append(Driven(sequences, turn=TrialTurn(index, self._want(index))))

    def _want(self, index: int) -> Callable[[int], None]:
        def want(number: int) -> None:
            if self.trials.want(WantTrial(index, number)):
                for each in self.all:
                    each.replays.turn.set_current(self.trials.current)

        return want

    def die(self) -> None:
        for each in self.all:
            each.die()
        self.send()

    def send(self) -> None:
        for each in self.all:
            each.send()

    def advance(self, tokens: int = 16) -> None:
        for each in self.all:
            each.advance(*each.running, tokens=tokens)
        self.send()


def test_of_two_frontends_only_the_guilty_request_fails() -> None:
    """The guilty one is with the second frontend; the first has no trial of its own while it is tried."""
    frontends = Frontends([case(20)[0] for _ in range(5)], [case(20)[0] for _ in range(5)])
    first, second = frontends.all
    guilty = 2
    frontends.die()
    deaths = 1
    while not second.failed:
        if guilty in second.running:
            frontends.die()
            deaths += 1
            assert deaths < 8
        else:
            assert first.running or second.running
            frontends.advance()
    assert (first.failed, second.failed) == ([], [guilty])
    while len(first.running) < 5 or len(second.running) < 4:
        frontends.advance()
    cases = [*first.replays._cases.values(), *second.replays._cases.values()]
    assert max(each.deaths for each in cases) == 2
    assert frontends.trials.current == Trial()


def test_frontends_try_requests_one_after_the_other() -> None:
    frontends = Frontends([case(20)[0], case(20)[0]], case(20))
    for _ in range(2):
        frontends.die()
    first, second = frontends.all
    assert (len(first.running), len(second.running)) == (1, 0)
    frontends.advance()
    assert (len(first.running), len(second.running)) == (1, 1)
    frontends.advance()
    assert (len(first.running), len(second.running)) == (2, 1)
    assert second.replays.turn.is_of_another


def test_a_new_request_counts_a_death_during_the_trial_of_another_frontend() -> None:
    frontends = Frontends(case(20), [])
    for _ in range(2):
        frontends.die()
    first, second = frontends.all
    assert first.running
    second.die(new := case()[0], old := case(100)[0])
    deaths = {stream: each.deaths for stream, each in second.replays._cases.items()}
    assert deaths == {new.stream: 1, old.stream: 0}


def test_the_turn_of_requests_that_have_left_passes_on() -> None:
    frontends = Frontends(case(20), case(20))
    for _ in range(2):
        frontends.die()
    first, second = frontends.all
    first.replays.ended(first.all[0])
    frontends.send()
    assert second.running == [0]


def test_progress_clears_a_request_of_earlier_deaths() -> None:
    """A long stream outlasts more engines than a request may end, with or without others."""
    driven = Driven([case(20)[0], case(20)[0]])
    for _ in range(9):
        driven.die()
        assert sorted(driven.running) == [0, 1]
        driven.advance(0, 1, tokens=1 << 20)
    assert not driven.failed


def test_a_request_that_ends_its_engine_late_is_found() -> None:
    """It gets 100 tokens each time: more than the first limits, and fewer than a later one."""
    guilty = 1
    driven = Driven([case(20)[0] for _ in range(3)])
    deaths = 0
    while not driven.failed:
        places = list(driven.running)
        driven.advance(*places, tokens=100)
        if guilty in places:
            driven.die()
            deaths += 1
            assert deaths < 10
    assert driven.failed == [guilty]


def test_with_other_frontends_a_tried_request_fails_at_its_fourth_death() -> None:
    frontends = Frontends(case(20), [])
    for _ in range(3):
        frontends.die()
        assert not frontends.all[0].failed
    frontends.die()
    assert frontends.all[0].failed == [0]


def test_a_lost_connection_alone_is_no_death() -> None:
    driven = Driven(case(20))
    for _ in range(9):
        driven.die()
        driven.replays.connected(0, driven.life - 1)
        driven.send()
    assert not driven.failed and driven.replays._cases[driven.all[0].stream].deaths == 0


def test_engines_in_a_row_that_end_take_all_suspects_along() -> None:
    driven = Driven([case(20)[0] for _ in range(60)])
    deaths = 0
    while len(driven.failed) < 60:
        driven.die()
        deaths += 1
    assert deaths == 2 + 7


def test_engines_that_end_together_count_one_death() -> None:
    """The tried request may be on either, and its engine's end may come first or last."""
    for first in (0, 1):
        one, other = case(20)[0], case(20)[0]
        replays = Replays(3, together=True)
        for life in (0, 1):
            assert replays.died([one, other], 0, life) == []
            for sequence in replays.due(lambda sequence: True):
                replays.sent(sequence, 20)
        assert replays.is_watching
        for rank in (first, 1 - first):
            assert replays.died([(one, other)[rank]], rank, 2) == []
        assert [replays._cases[each.stream].deaths for each in (one, other)] == [3, 2]


def test_few_long_sequences_start_at_once() -> None:
    first, second, third = sequences = case(num=3)
    replays = Replays(3)
    replays.died(sequences, 0, 0)
    sent: list[RunningSequence] = []

    def send(sequence: RunningSequence) -> None:
        sent.append(sequence)
        replays.sent(sequence, 1 << 20)

    async def passes(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    async def run() -> None:
        task = asyncio.create_task(replays.run(lambda: lambda sequence: True, send))
        await passes(lambda: sent == [first, second])
        await asyncio.sleep(0.02)
        assert sent == [first, second]
        replays.advanced(second)
        await passes(lambda: sent == sequences)
        replays.ended(first)
        replays.advanced(third)
        assert not replays.is_watching
        task.cancel()

    asyncio.run(run())


def test_without_replays_all_fail() -> None:
    replays = Replays(0)
    sequences = case(num=2)
    assert replays.died(sequences, 0, 0) == sequences
    assert (len(replays), replays.due(lambda sequence: True)) == (0, [])


def test_planned_ends_are_no_deaths_of_any_request() -> None:
    (one,) = case()
    (other,) = case()
    replays = Replays(3)
    for life in range(20):
        assert replays.died([one, other], 0, life, is_planned=True) == []
        assert replays.due(lambda sequence: True) == [one, other]
        for sequence in (one, other):
            replays.sent(sequence, 20)


@pytest.mark.parametrize("seed", range(30))
def test_a_suspected_request_is_in_one_group(seed: int) -> None:
    """Sequences of a request run on two engines, which end at random, also during its trial."""
    source = random.Random(seed)
    replays = Replays(100)
    ranks = {
        sequence: source.randrange(2) for _ in range(6) for sequence in case(20, source.choice([1, 2, 3]))
    }
    running = dict.fromkeys(ranks)
    for life in range(60):
        rank = source.randrange(2)
        lost = [sequence for sequence in running if ranks[sequence] == rank]
        for sequence in replays.died(lost, rank, life):
            replays.ended(sequence)
            del ranks[sequence]
        for sequence in lost:
            running.pop(sequence)
        if source.random() < 0.2 and ranks:
            replays.ended(sequence := source.choice(list(ranks)))
            running.pop(sequence, None)
            del ranks[sequence]
        closed = source.choice([-1, 0, 1])  # an engine that is not ready yet
        for sequence in replays.due(lambda each: ranks[each] != closed):  # noqa: B023
            replays.sent(sequence, 20)
            running[sequence] = None
        for sequence in running:
            if source.random() < 0.3:
                sequence.progress.tokens += 16
                replays.advanced(sequence)
        places = Counter(stream for group in replays._groups for stream in group)
        suspected = [stream for stream, each in replays._cases.items() if each.suspected]
        assert places == Counter(suspected)
