"""What the core knows of its requests: times, cache misses, preemptions, drafts; and commands about them."""

import logging

import pytest

from atom.shared.messages.admin import (
    MAX_INFOS,
    AbortNamed,
    Done,
    GetRequests,
    Miss,
    RequestInfo,
    RequestInfos,
    RequestStatus,
    ResetPrefixCache,
)
from atom.shared.messages.engine import FinishReason, TokenDeltas
from atom.shared.messages.worker import FullAttentionSpec, SlidingWindowSpec
from engine_core.commands import responses
from engine_core.requests.recent import Recent
from engine_core.requests.request import Request
from engine_core.requests.request_log import RequestLog
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import CoreDriver

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]  # two full blocks of four, and two more


def driver(blocks: int = 32, rows: int = 4, **options: object) -> CoreDriver:
    limits = Limits(max_num_seqs=rows, max_num_batched_tokens=64, num_drafts=options.pop("num_drafts", 0))  # type: ignore[arg-type]
    return CoreDriver([FULL], [blocks], limits, **options)  # type: ignore[arg-type]


def info(core: CoreDriver, name: str) -> RequestInfo:
    total, (found,) = core.core.requests(name)
    assert total == 1
    return found


def test_times_are_those_of_each_phase() -> None:
    core = driver()
    core.add(1, PROMPT, 3, name="one", tenant="t")
    core.clock.now += 2.0
    assert (info(core, "one").status, info(core, "one").queue_s) == (RequestStatus.WAITING, 2.0)
    core.send()
    core.clock.now += 3.0
    assert (info(core, "one").status, info(core, "one").prefill_s) == (RequestStatus.DECODING, 3.0)
    core.deliver()
    core.clock.now += 4.0
    running = info(core, "one")
    assert (running.queue_s, running.prefill_s, running.decode_s, running.generated_tokens) == (2, 3, 4, 1)
    core.run()
    core.clock.now += 100.0
    ended = info(core, "one")
    assert (ended.status, ended.finish_reason) == (RequestStatus.FINISHED, FinishReason.MAX_TOKENS)
    assert (ended.queue_s, ended.prefill_s, ended.decode_s, ended.generated_tokens) == (2, 3, 4, 3)
    assert (ended.tenant, ended.prompt_tokens, ended.sequence, ended.replays) == ("t", 10, 0, 0)


def test_why_the_first_block_was_not_cached() -> None:
    core = driver(blocks=6)
    core.add(1, PROMPT, 2, name="first")
    core.run()
    core.add(2, [*PROMPT[:8], 1, 1], 2, name="hit")
    core.run()
    core.add(3, PROMPT[:4] + [7] * 6, 2, name="longer")
    core.run()
    core.add(4, PROMPT, 2, name="salted", cache_salt="s")
    core.run()
    core.add(5, [6] * 20, 2, name="large")
    core.run()
    core.add(6, PROMPT, 2, name="again")
    core.run()
    core.add(7, PROMPT, 2, name="scored", prompt_logprobs=0)
    core.run()
    found = {name: info(core, name) for name in ("first", "hit", "longer", "salted", "again", "scored")}
    misses = {name: (one.cached_tokens, one.missed_block, one.miss) for name, one in found.items()}
    assert misses == {
        "first": (0, 0, Miss.NEVER_CACHED),
        "hit": (8, -1, Miss.NONE),
        "longer": (4, 1, Miss.NEVER_CACHED),
        "salted": (0, 0, Miss.OTHER_SALT),
        "again": (0, 0, Miss.EVICTED),
        "scored": (0, 0, Miss.OFF),
    }


def test_a_cache_that_is_off() -> None:
    core = driver(enable_prefix_caching=False)
    core.add(1, PROMPT, 2, name="one")
    core.run()
    assert (info(core, "one").missed_block, info(core, "one").miss) == (0, Miss.OFF)


def test_preemptions_drafts_and_replays_are_counted() -> None:
    core = driver(blocks=8, rows=2)
    for number in (1, 2):
        core.add(number, PROMPT, 14, name=f"{number}", cache_salt=f"{number}")
    core.run()
    assert info(core, "2").preemptions == core.core.stats().preemptions > 0
    assert info(core, "1").preemptions == 0

    drafting = driver(num_drafts=3, draft=lambda most: (most, 2))
    drafting.add(1, PROMPT, 12, name="drafted")
    drafting.run()
    accepted = sum(drafting.core.stats().num_accepted_tokens_per_pos)
    assert 4 <= info(drafting, "drafted").accepted_drafts <= min(accepted, 8)

    replaying = driver()
    replaying.add(1, [*PROMPT, 1, 2], 12, name="again", prompt_length=len(PROMPT), replays=1)
    replaying.send()
    replaying.clock.now += 1.0
    replaying.deliver()
    replaying.clock.now += 2.0
    again = info(replaying, "again")
    assert (again.replays, again.generated_tokens, again.prefill_s, again.decode_s) == (1, 3, 1, 2)


def test_aborted_requests_are_remembered_with_the_reason() -> None:
    core = driver()
    core.add(1, PROMPT, 5, name="a")
    core.core.abort([1, 99], FinishReason.STOP_STRING)
    assert info(core, "a").finish_reason == FinishReason.STOP_STRING


def test_sequences_of_a_request_are_found_together() -> None:
    core = driver()
    core.add(1, PROMPT, 5, n=3, name="a")
    core.core.abort([2])
    total, found = core.core.requests("a")
    assert total == 3
    assert [(one.sequence, one.status) for one in found] == [
        (1, RequestStatus.FINISHED),
        (0, RequestStatus.WAITING),
        (2, RequestStatus.WAITING),
    ]
    assert [one.sequence for one in core.core.requests()[1]] == [0, 2]


def test_an_answer_is_bounded() -> None:
    core = driver()
    for start in range(0, 2 * MAX_INFOS, 512):
        core.add(start, PROMPT, 2, n=512, name="a")
    total, found = core.core.requests()
    assert (total, len(found)) == (2 * MAX_INFOS, MAX_INFOS)
    core.core.abort(list(range(2 * MAX_INFOS)))
    total, found = core.core.requests("a")
    assert (total, len(found)) == (2 * MAX_INFOS, MAX_INFOS)


def test_only_the_last_sequences_are_remembered() -> None:
    core = driver()
    log = RequestLog(4, size=3)
    requests = []
    for number, name in enumerate(("a", "b", "a", "c")):
        core.add(number, PROMPT, 2, name=name)
        requests.append(core.core._scheduler.requests[number])
    add_all(log, requests)
    assert [len(list(log.named(name))) for name in "abc"] == [1, 1, 1]
    add_all(log, requests[:3])
    assert [len(list(log.named(name))) for name in "abc"] == [2, 1, 0]


def add_all(log: RequestLog, requests: list[Request]) -> None:
    for request in requests:
        log.add(request, FinishReason.EOS, 0.0)


def test_named_requests_of_all_frontends_are_aborted() -> None:
    core = driver()
    for number, (name, frontend) in enumerate([("a", b"x"), ("b", b"x"), ("a", b"y"), ("c", b"y")]):
        core.add(number, PROMPT, 5, name=name, frontend=frontend)
    core.send()
    sent = list(responses(core.core, b"asker", AbortNamed(7, ["a", "unknown"])))
    ends = {to: [end.request_id for end in message.finished] for to, message in sent if is_end(message)}
    assert ends == {b"x": [0], b"y": [2]}
    assert sent[-1] == (b"asker", Done(7, 2))
    core.core.check_integrity()
    assert list(responses(core.core, b"asker", AbortNamed(8, [], all=True)))[-1] == (b"asker", Done(8, 2))
    ((to, message),) = responses(core.core, b"asker", GetRequests(9))
    assert (to, message) == (b"asker", RequestInfos(9, 0, []))


def test_a_client_aborts_only_requests_of_its_own_key() -> None:
    core = driver()
    for number, tenant in enumerate(["one", "two", "one"]):
        core.add(number, PROMPT, 5, name="same", tenant=tenant)
    core.send()
    (*_, (_, done)) = responses(core.core, b"asker", AbortNamed(7, ["same"], tenant="one"))
    assert done == Done(7, 2)
    assert core.core.requests("same")[0] == 3 and core.core.num_live == 1
    (*_, (_, done)) = responses(core.core, b"asker", AbortNamed(8, ["same"], tenant=""))
    assert done == Done(8, 0)


def is_end(message: object) -> bool:
    return isinstance(message, TokenDeltas)


@pytest.mark.parametrize("specs", [[FULL], [FULL, SlidingWindowSpec(4, 1, 8)]])
def test_a_reset_forgets_what_was_and_what_is_computed(specs: list[FullAttentionSpec]) -> None:
    core = CoreDriver(specs, [32] * len(specs), Limits(4, 64))
    core.add(1, PROMPT, 2)
    core.run()
    core.add(2, PROMPT, 9)
    core.send()
    ((_, done),) = responses(core.core, b"asker", ResetPrefixCache(1))
    assert isinstance(done, Done) and done.count >= 2
    core.core.check_integrity()
    core.send()
    core.deliver()
    core.core.check_integrity()
    core.run()
    core.add(3, PROMPT, 2)
    core.run()
    assert core.done[3].cached_tokens == 0
    core.add(4, PROMPT, 2)
    core.run()
    assert core.done[4].cached_tokens == 8


def test_a_reset_while_a_step_fails_loses_no_request() -> None:
    core = driver()
    core.add(1, PROMPT, 4)
    core.add(2, PROMPT, 4)
    core.send_failing(lambda rows: rows[:1])
    core.send()
    core.core.reset_prefix_cache()
    core.core.check_integrity()
    core.run()
    assert sorted([*core.done, *core.failed]) == [1, 2]


def test_the_end_of_a_request_is_a_line_of_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    core = driver()
    with caplog.at_level(logging.DEBUG, logger="atom"):
        core.add(1, PROMPT, 2, name="cmpl-1")
        core.run()
    assert "request cmpl-1 ended by MAX_TOKENS: 10 prompt tokens (0 cached), 2 generated" in caplog.text


def test_recent_keys_are_remembered_and_old_ones_forgotten() -> None:
    recent: Recent[int] = Recent(10)
    for number in range(100):
        recent.put(str(number).encode(), number)
    assert all(recent.get(str(number).encode()) == number for number in range(90, 100))
    assert recent.get(b"70") is None
