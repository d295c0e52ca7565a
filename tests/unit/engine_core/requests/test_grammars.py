"""Requests wait for their grammar and their turn; a grammar in use is never dropped for another one."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from atom.shared.messages.admin import RequestStatus
from atom.shared.messages.engine import AddRequest, FinishReason, Sampling, pack_ids
from atom.shared.messages.grammar import (
    MAX_GRAMMAR_MEMORY,
    MAX_SOURCE_BYTES,
    DropGrammar,
    GetGrammar,
    Grammar,
    GrammarBytes,
    GrammarLoaded,
    LoadGrammar,
    RowGrammar,
)
from atom.shared.messages.worker import BatchResult, FullAttentionSpec
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests import grammars
from engine_core.requests.grammars import MAX_MEMORY
from engine_core.scheduler import Limits

FRONTEND = b"f"
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def new_core(clock: Callable[[], float] = time.monotonic) -> EngineCore:
    kv = KVCacheManager([FullAttentionSpec(4, 1)], [64], 64, 0)
    return EngineCore(Limits(max_num_seqs=8, max_num_batched_tokens=64), kv, 128, clock)


def request(number: int, key: bytes, memory: int = 1, max_tokens: int = 2, token_us: int = 0) -> AddRequest:
    grammar = Grammar(RowGrammar(key, [1]), memory, token_us)
    return AddRequest([number], pack_ids([5, 6]), max_tokens, GREEDY, grammar=grammar)


def messages(core: EngineCore) -> list[LoadGrammar | DropGrammar]:
    """Those for the workers, after frontends have sent what they are asked for."""
    found = core.grammar_messages()
    for _, question in core.grammar_questions():
        assert core.grammar_provided(GrammarBytes(question.key, b"x")) == {}
    return found + core.grammar_messages()


def finish(core: EngineCore) -> None:
    """Run steps until nothing is left to run."""
    while (batch := core.schedule()) is not None:
        core.update_from_output(BatchResult(batch.step, pack_ids([7] * len(batch.rows))))


def test_a_request_waits_for_its_grammar() -> None:
    core = new_core()
    assert core.add(request(1, b"a"), FRONTEND) is None
    assert core.add(request(2, b"a"), FRONTEND) is None
    assert messages(core) == [LoadGrammar(b"a", b"x")]
    assert core.schedule() is None
    assert (core.stats().waiting, core.num_live) == (2, 2)
    core.grammar_loaded(GrammarLoaded(b"a"))
    batch = core.schedule()
    assert batch is not None
    assert [row.grammar and row.grammar.key for row in batch.new_rows] == [b"a", b"a"]
    assert [row.request_id for row in batch.new_rows] == [1, 2]
    core.add(request(3, b"a"), FRONTEND)  # the workers have it
    assert core.grammar_messages() == []
    assert core.num_live == 3


def test_a_grammar_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    core = new_core()
    core.add(request(1, b"a"), FRONTEND)
    core.add(request(2, b"b"), FRONTEND)
    messages(core)
    deltas = core.grammar_loaded(GrammarLoaded(b"a", "no memory"))[FRONTEND]
    assert [(end.request_id, end.reason, end.message) for end in deltas.finished] == [
        (1, FinishReason.ERROR, "no memory")
    ]
    assert core.grammar_messages() == [DropGrammar(b"a")]
    assert core.grammar_loaded(GrammarLoaded(b"a")) == {}
    assert core.num_live == 1


def test_all_requests_of_a_grammar_fail_when_its_process_has_ended() -> None:
    core = new_core()
    for number in range(3):
        core.add(request(number, b"a", max_tokens=9), FRONTEND)
    core.add(AddRequest([9], pack_ids([5, 6]), 2, GREEDY), FRONTEND)
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    batch = core.schedule()
    assert batch is not None and len(batch.rows) == 4
    deltas = core.grammar_loaded(GrammarLoaded(b"a", "too ambiguous", is_refused=True))[FRONTEND]
    assert {(end.request_id, end.reason, end.message) for end in deltas.finished} == {
        (number, FinishReason.REFUSED, "too ambiguous") for number in range(3)
    }
    assert core.grammar_messages() == [DropGrammar(b"a")]
    core.update_from_output(BatchResult(batch.step, pack_ids([7] * 4)))
    core.check_integrity()
    core.add(request(10, b"a"), FRONTEND)  # a later one loads it again
    assert messages(core) == [LoadGrammar(b"a", b"x")]
    assert core.num_live == 2


def test_a_lost_grammar_is_loaded_again() -> None:
    """What runs goes on; what comes meanwhile waits. One without requests is dropped."""
    core = new_core()
    core.add(request(1, b"a", max_tokens=9), FRONTEND)
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    assert core.schedule() is not None
    assert core.grammar_loaded(GrammarLoaded(b"a", is_lost=True)) == {}
    core.add(request(2, b"a"), FRONTEND)
    assert [*core._grammars.waiting] == [2]
    assert messages(core) == [LoadGrammar(b"a", b"x")]
    assert core.grammar_loaded(GrammarLoaded(b"a")) == {}
    assert core.num_live == 2 and not core._grammars.waiting
    core.abort([1, 2])
    assert core.grammar_loaded(GrammarLoaded(b"a", is_lost=True)) == {}
    assert messages(core) == [DropGrammar(b"a")]
    core.add(request(3, b"a"), FRONTEND)
    assert messages(core) == [LoadGrammar(b"a", b"x")]


def running_and_lost(clock: Callable[[], float]) -> EngineCore:
    """Requests 1, with a grammar that the workers have lost, and 9, without one; a step is in flight."""
    core = new_core(clock)
    core.add(request(1, b"a", max_tokens=3), FRONTEND)
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    core.add(AddRequest([9], pack_ids([5, 6]), 3, GREEDY), FRONTEND)
    batch = core.schedule()
    assert batch is not None and len(batch.rows) == 2
    assert core.grammar_loaded(GrammarLoaded(b"a", is_lost=True)) == {}
    found = core.update_from_output(BatchResult(batch.step, pack_ids([8]), late=[0]))
    assert [first.request_id for first in found[FRONTEND].first] == [9]
    return core


def test_requests_of_a_lost_grammar_wait_until_it_is_loaded() -> None:
    """However long that takes: no step without its masks is one for which they are late."""
    now = 0.0
    core = running_and_lost(lambda: now)
    while (batch := core.schedule()) is not None:
        assert len(core.update_from_output(BatchResult(batch.step, pack_ids([8])))) == 1
    core.check_integrity()
    for _ in range(12):
        now += 10.0
        assert core.schedule() is None and core.num_live == 1
    assert messages(core) == [LoadGrammar(b"a", b"x")]
    assert core.grammar_loaded(GrammarLoaded(b"a")) == {}
    for expected in ([], [], [(1, FinishReason.MAX_TOKENS)]):
        batch = core.schedule()
        assert batch is not None
        found = core.update_from_output(BatchResult(batch.step, pack_ids([7])))
        assert [(end.request_id, end.reason) for end in found[FRONTEND].finished] == expected
    core.check_integrity()
    assert core.num_live == 0


def test_a_lost_grammar_that_cannot_be_loaded_fails_its_requests() -> None:
    core = running_and_lost(lambda: 0.0)
    core.abort([9])
    messages(core)
    deltas = core.grammar_loaded(GrammarLoaded(b"a", "no memory"))[FRONTEND]
    assert [(end.request_id, end.message) for end in deltas.finished] == [(1, "no memory")]
    core.check_integrity()
    assert core.num_live == 0 and core.schedule() is None


def test_a_request_that_was_late_waits_for_its_lost_grammar_too() -> None:
    now = 0.0
    core = new_core(lambda: now)
    core.add(request(1, b"a"), FRONTEND)
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    batch = core.schedule()
    assert batch is not None
    core.update_from_output(BatchResult(batch.step, b"", late=[0]))
    core.grammar_loaded(GrammarLoaded(b"a", is_lost=True))
    now = 60.0
    assert core.schedule() is None and core.has_held
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    finish(core)
    assert core.num_live == 0
    core.check_integrity()


def test_of_a_costly_grammar_few_requests_run_at_a_time_and_no_others_wait() -> None:
    core = new_core()
    for number in range(5):
        core.add(request(number, b"slow", token_us=8000), FRONTEND)
    for number in range(5, 9):
        core.add(request(number, b"fast", token_us=10), FRONTEND)
    for key in (b"slow", b"fast"):
        core.grammar_loaded(GrammarLoaded(key))
    steps = []
    while (batch := core.schedule()) is not None:
        steps.append([row.request_id for row in batch.new_rows])
        core.update_from_output(BatchResult(batch.step, pack_ids([7] * len(batch.rows))))
        core.grammar_messages()
    assert steps[0] == [0, 1, 5, 6, 7, 8]
    assert [number for step in steps[1:] for number in step] == [2, 3, 4]
    core.abort([])
    assert core.num_live == 0


def test_a_late_row_runs_again_after_a_time_and_its_tokens_are_dropped() -> None:
    now = [0.0]
    core = new_core(clock=lambda: now[0])
    core.add(request(1, b"a", max_tokens=3), FRONTEND)
    core.add(AddRequest([2], pack_ids([5, 6]), 6, GREEDY), FRONTEND)
    core.grammar_loaded(GrammarLoaded(b"a"))
    first = core.schedule()
    second = core.schedule()
    assert first is not None and second is not None
    row = first.rows[[new.request_id for new in first.new_rows].index(1)]
    deltas = core.update_from_output(BatchResult(first.step, pack_ids([7]), late=[row]))[FRONTEND]
    assert deltas.request_ids == [2]
    assert [one.request_id for one in deltas.first] == [2]
    assert core.has_held and core.stats().waiting == 1
    deltas = core.update_from_output(BatchResult(second.step, pack_ids([7]), late=[row]))[FRONTEND]
    assert deltas.request_ids == [2]
    core.check_integrity()
    third = core.schedule()
    assert third is not None and not third.new_rows
    now[0] += 1.0
    core.update_from_output(BatchResult(third.step, pack_ids([7])))
    fourth = core.schedule()
    assert fourth is not None and [new.request_id for new in fourth.new_rows] == [1]
    assert not core.has_held
    deltas = core.update_from_output(BatchResult(fourth.step, pack_ids([7, 7])))[FRONTEND]
    assert {*deltas.request_ids} == {1, 2} and [one.request_id for one in deltas.first] == [1]
    finish(core)
    core.check_integrity()
    assert core.num_live == 0


def test_a_row_that_is_always_late_fails() -> None:
    now = [0.0]
    core = new_core(clock=lambda: now[0])
    core.add(request(1, b"a", max_tokens=3), FRONTEND)
    core.grammar_loaded(GrammarLoaded(b"a"))
    ends = []
    for _ in range(20):
        now[0] += 60.0
        while (batch := core.schedule()) is not None:
            for deltas in core.update_from_output(BatchResult(batch.step, b"", late=batch.rows)).values():
                ends += deltas.finished
    assert [(end.request_id, end.reason) for end in ends] == [(1, FinishReason.ERROR)]
    assert core.num_live == 0


def test_a_held_request_can_be_aborted() -> None:
    core = new_core()
    core.add(request(1, b"a", max_tokens=3), FRONTEND)
    core.grammar_loaded(GrammarLoaded(b"a"))
    batch = core.schedule()
    assert batch is not None
    core.update_from_output(BatchResult(batch.step, b"", late=batch.rows))
    assert core.has_held
    core.abort([1])
    assert core.num_live == 0 and not core.has_held
    core.check_integrity()


def test_the_last_step_of_a_request_may_be_late() -> None:
    now = [0.0]
    core = new_core(clock=lambda: now[0])
    core.add(request(1, b"a", max_tokens=2), FRONTEND)
    core.grammar_loaded(GrammarLoaded(b"a"))
    first, second = core.schedule(), core.schedule()
    assert first is not None and second is not None
    core.update_from_output(BatchResult(first.step, pack_ids([7])))
    core.update_from_output(BatchResult(second.step, b"", late=second.rows))
    assert core.num_live == 1
    now[0] += 1.0
    third = core.schedule()
    assert third is not None
    deltas = core.update_from_output(BatchResult(third.step, pack_ids([8])))[FRONTEND]
    assert [end.reason for end in deltas.finished] == [FinishReason.MAX_TOKENS]
    assert core.num_live == 0
    core.check_integrity()


def test_waiting_requests_can_be_aborted() -> None:
    core = new_core()
    core.add(request(1, b"a"), FRONTEND)
    core.add(request(2, b"b"), FRONTEND)
    core.abort([1])
    assert core.abort_frontend(FRONTEND) == 1
    for key in (b"a", b"b"):
        core.grammar_loaded(GrammarLoaded(key))
    assert core.schedule() is None
    assert core.num_live == 0
    core.check_integrity()


def test_the_prompts_of_ended_requests_are_not_kept() -> None:
    core = new_core()
    core.add(request(1, b"a"), FRONTEND)
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    core.add(request(2, b"a"), FRONTEND)
    ended = [weakref.ref(one) for one in core._scheduler.requests.values()]
    finish(core)
    core.add(request(3, b"a"), FRONTEND)  # later steps have replaced those of the ended requests
    finish(core)
    gc.collect()
    assert len(ended) == 2 and not any(one() for one in ended)


def test_aborted_requests_without_room_are_not_kept() -> None:
    core, number = new_core(), MAX_MEMORY // MAX_GRAMMAR_MEMORY
    for i in range(number + 2):
        core.add(request(i, b"%d" % i, MAX_GRAMMAR_MEMORY), FRONTEND)
    aborted = weakref.ref(core._grammars.waiting[number + 1])
    core.abort([number + 1])  # another one without room is in front of it
    gc.collect()
    assert aborted() is None and core.num_live == number + 1


def test_waiting_requests_are_listed_and_aborted_by_name() -> None:
    now = [5.0]
    core = new_core(clock=lambda: now[0])
    for number in (1, 2):
        core.add(replace(request(number, b"a"), name=f"r{number}"), FRONTEND)
    now[0] += 3.0
    total, (first, second) = core.requests()
    assert (total, first.name, second.name) == (2, "r1", "r2")
    assert (first.status, first.queue_s) == (RequestStatus.WAITING, 3.0)
    count, ends = core.abort_named({"r1"})
    assert count == 1 and [end.request_id for end in ends[FRONTEND].finished] == [1]
    assert [found.status for found in core.requests("r1")[1]] == [RequestStatus.FINISHED]
    messages(core)
    core.grammar_loaded(GrammarLoaded(b"a"))
    (left,) = core.requests()[1]
    assert (left.name, left.queue_s) == ("r2", 3.0)
    assert core.abort_named(None)[0] == 1 and core.num_live == 0


def test_idle_grammars_give_way_and_used_ones_do_not() -> None:
    core, each = new_core(), MAX_GRAMMAR_MEMORY
    number = MAX_MEMORY // each
    for i in range(number):
        core.add(request(i, b"%d" % i, each), FRONTEND)
        messages(core)
        core.grammar_loaded(GrammarLoaded(b"%d" % i))
    core.add(request(99, b"new", each), FRONTEND)
    assert core.grammar_messages() == []  # all are in use
    finish(core)
    assert messages(core) == [DropGrammar(b"0"), LoadGrammar(b"new", b"x")]
    core.grammar_loaded(GrammarLoaded(b"new"))
    assert core.num_live == 1
    finish(core)
    assert core.num_live == 0


def test_the_end_of_a_dropped_grammar_fails_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have ended just before it was dropped."""
    monkeypatch.setattr(grammars, "MAX_MEMORY", 1)
    core = new_core()
    for number, key in enumerate((b"a", b"b")):
        core.add(request(number, key), FRONTEND)
        messages(core)
        core.grammar_loaded(GrammarLoaded(key))
        finish(core)
    core.add(request(2, b"a"), FRONTEND)
    assert core.grammar_messages() == [DropGrammar(b"b")]
    assert core.grammar_loaded(GrammarLoaded(b"a", "its process has ended")) == {}
    assert messages(core) == [LoadGrammar(b"a", b"x")] and core.num_live == 1


def test_grammars_out_of_bounds_are_refused() -> None:
    core = new_core()
    for bad in (
        request(1, b"a", memory=MAX_GRAMMAR_MEMORY + 1),
        request(1, b""),
    ):
        deltas = core.add(bad, FRONTEND)
        assert deltas is not None
        assert deltas.finished[0].reason is FinishReason.ERROR
    assert core.grammar_messages() == []


def test_a_grammar_is_asked_for_once_whatever_the_number_of_requests() -> None:
    core = new_core()
    for number in range(20):
        core.add(request(number, b"a"), FRONTEND)
    core.grammar_messages()
    assert core.grammar_questions() == [(FRONTEND, GetGrammar(b"a"))]
    assert core.grammar_provided(GrammarBytes(b"a", b"x")) == {}
    assert core.grammar_provided(GrammarBytes(b"a", b"y")) == {}, "it was not asked for"
    assert core.grammar_messages() == [LoadGrammar(b"a", b"x")]
    core.grammar_loaded(GrammarLoaded(b"a"))
    core.add(request(99, b"a"), FRONTEND)
    assert core.grammar_messages() == core.grammar_questions() == []


def test_frontends_are_asked_in_turn_until_one_sends_the_grammar() -> None:
    """One may have died, or got the request from a dead one, without its grammar."""
    now = [0.0]
    core = new_core(lambda: now[0])
    core.add(request(1, b"a"), FRONTEND)
    core.add(request(2, b"a"), b"other")
    for asked in (FRONTEND, b"other", FRONTEND):
        assert core.grammar_questions() == [(asked, GetGrammar(b"a"))]
        assert core.grammar_questions() == []
        now[0] += 1.1
    assert core.grammar_provided(GrammarBytes(b"a", b"x")) == {}
    assert core.grammar_messages() == [LoadGrammar(b"a", b"x")]
    assert core.grammar_questions() == []


def test_the_only_frontend_is_asked_again() -> None:
    now = [0.0]
    core = new_core(lambda: now[0])
    core.add(request(1, b"a"), FRONTEND)
    for _ in range(3):
        assert core.grammar_questions() == [(FRONTEND, GetGrammar(b"a"))]
        now[0] += 1.1
    core.abort([1])
    assert core.grammar_questions() == []


def test_another_frontend_is_asked_if_the_first_one_has_no_request_left() -> None:
    core = new_core()
    core.add(request(1, b"a"), FRONTEND)
    core.add(request(2, b"a"), b"other")
    core.add(request(3, b"a"), b"third")
    assert [to for to, _ in core.grammar_questions()] == [FRONTEND]
    core.abort([1])
    assert core.grammar_questions() == [(b"other", GetGrammar(b"a"))]
    core.abort_frontend(b"other")
    assert core.grammar_questions() == [(b"third", GetGrammar(b"a"))]
    core.abort([3])
    assert core.grammar_questions() == [] and core.grammar_messages() == []
    core.grammar_provided(GrammarBytes(b"a", b"x"))  # it was sent before the last one ended
    assert core.grammar_messages() == []
    core.add(request(4, b"a"), FRONTEND)
    assert messages(core) == [LoadGrammar(b"a", b"x")]


def test_a_grammar_that_is_too_large_fails_its_requests_alone() -> None:
    core = new_core()
    core.add(request(1, b"a"), FRONTEND)
    core.add(request(2, b"b"), FRONTEND)
    deltas = core.grammar_provided(GrammarBytes(b"a", bytes(MAX_SOURCE_BYTES + 1)))[FRONTEND]
    assert [(end.request_id, end.reason) for end in deltas.finished] == [(1, FinishReason.ERROR)]
    assert core.num_live == 1 and core.grammar_messages() == []
