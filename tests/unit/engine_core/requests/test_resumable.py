import pytest

from atom.shared.messages.codec import Decoder
from atom.shared.messages.engine import Abort, AddRequest, FinishReason, TokenDeltas, pack_ids
from atom.shared.messages.grammar import (
    MAX_SOURCE_BYTES,
    Grammar,
    GrammarBytes,
    GrammarLoaded,
    RowGrammar,
)
from atom.shared.messages.resume import Claim, Claimed, EndedSequence, Resumable
from atom.shared.messages.worker import FullAttentionSpec
from engine_core.requests import resumable
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import CoreDriver

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
GRACE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def driver(clock: Clock | None = None, grace_s: float = GRACE_S) -> CoreDriver:
    run = CoreDriver([FULL], [64], Limits(4, 16), max_model_len=64)
    run.core._resumable = resumable.ResumableStreams(grace_s, clock or Clock())
    return run


def stream(key: str, first: int, count: int = 1) -> Resumable:
    return Resumable(key, b"form", first, count)


def step(run: CoreDriver) -> dict[bytes, TokenDeltas]:
    batch = run.core.schedule()
    assert batch is not None
    return run.core.update_from_output(run.worker.execute(batch))


def claim(run: CoreDriver, key: str, frontend: bytes, tenant: str = "") -> Claimed:
    """What `frontend` gets."""
    found = dict(run.core.claim(Claim(7, key, tenant), frontend))
    answer = found[frontend]
    assert isinstance(answer, Claimed) and answer.number == 7
    return answer


def test_an_orphan_goes_on_and_is_claimed_with_all_its_tokens() -> None:
    run = driver()
    run.add(1, range(5), max_tokens=6, resumable=stream("k", 1))
    run.add(2, range(5), max_tokens=6)
    first = step(run)[b"a"]
    run.core.abort_frontend(b"a")
    assert run.core.stats().orphans == 1 and run.core.num_live == 1
    assert step(run) == {}  # nobody gets its token
    claimed = claim(run, "k", b"b")
    request = Decoder[AddRequest](AddRequest).decode(claimed.requests[0].request)
    assert request.prompt_ids == pack_ids(range(5)) and request.prompt_length == 0
    (sequence,) = claimed.requests[0].sequences
    assert len(sequence.output_ids) == 8 and sequence.output_ids[:4] == first.token_ids[:4]
    assert list(step(run)) == [b"b"]
    assert run.core.stats().orphans == 0


def test_a_stream_is_taken_from_a_frontend_that_lives_and_cannot_abort_it_any_more() -> None:
    run = driver()
    run.add(1, range(5), max_tokens=6, resumable=stream("k", 1))
    step(run)
    found = dict(run.core.claim(Claim(7, "k", ""), b"b"))
    deltas = found[b"a"]
    assert isinstance(deltas, TokenDeltas) and deltas.finished[0].reason is FinishReason.REFUSED
    run.core.abort_own(Abort([1]), b"a")
    assert run.core.num_live == 1
    run.core.abort_own(Abort([1]), b"b")
    assert run.core.num_live == 0
    assert claim(run, "k", b"c") == Claimed(7, "k")


def test_another_api_key_gets_nothing() -> None:
    run = driver()
    run.add(1, range(5), max_tokens=6, resumable=stream("k", 1), tenant="one")
    step(run)
    assert claim(run, "k", b"b", "two") == Claimed(7, "k")
    assert list(step(run)) == [b"a"]


def test_orphans_end_after_the_grace() -> None:
    clock = Clock()
    run = driver(clock)
    run.add(1, range(5), max_tokens=50, resumable=stream("k", 1))
    step(run)
    run.core.abort_frontend(b"a")
    clock.now += GRACE_S - 1
    run.core.end_expired()
    assert run.core.num_live == 1
    clock.now += 2
    run.core.end_expired()
    assert run.core.num_live == 0 and run.core.stats().orphans_expired == 1
    assert claim(run, "k", b"b") == Claimed(7, "k")
    assert run.core.stats().kv_blocks_used == 0


def test_a_stream_that_has_ended_is_kept_for_the_grace() -> None:
    """With its last tokens, which the client may not have got; its sequences end one after another."""
    clock = Clock()
    run = driver(clock)
    run.add(1, range(5), max_tokens=2, n=2, resumable=stream("k", 1, 2))
    step(run)
    run.core.abort_own(Abort([2], FinishReason.STOP_STRING), b"a")
    step(run)
    assert run.core.num_live == 0
    clock.now += GRACE_S - 1
    run.core.end_expired()
    claimed = claim(run, "k", b"b")
    ends = {end.request_id: (len(end.output_ids), FinishReason(end.reason)) for end in claimed.ended}
    assert ends == {1: (8, FinishReason.MAX_TOKENS), 2: (4, FinishReason.STOP_STRING)}
    assert claimed.requests[0].sequences == []
    clock.now += GRACE_S + 1
    run.core.end_expired()
    assert claim(run, "k", b"b") == Claimed(7, "k")


def test_without_a_grace_nothing_outlives_its_frontend() -> None:
    run = driver(grace_s=0.0)
    run.add(1, range(5), max_tokens=50, resumable=stream("k", 1))
    step(run)
    assert run.core.abort_frontend(b"a") == 1
    assert claim(run, "k", b"b") == Claimed(7, "k")


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "_MAX_KEPT_BYTES", 3 * 2200)
    run = driver()
    for number in range(1, 7):
        run.add(number, range(5), max_tokens=1, resumable=stream(f"k{number}", number))
        step(run)
        run.core.end_expired()
    kept = [number for number in range(1, 7) if claim(run, f"k{number}", b"b").ended]
    assert kept == [4, 5, 6]


def test_orphans_are_offered_to_another_frontend_that_outlives_the_engine() -> None:
    clock = Clock()
    run = driver(clock)
    run.add(1, range(5), max_tokens=50, resumable=stream("k", 1))
    step(run)
    run.core.abort_frontend(b"a")
    assert run.core.offers(b"b") == []  # its frontend may come back
    clock.now += 4
    (offer,) = run.core.offers(b"b")
    assert (offer.number, offer.key, offer.left_s) == (0, "k", GRACE_S - 4)
    assert run.core.offers(b"c") == [] and list(step(run)) == [b"b"]
    clock.now += 100  # its frontend counts the time now
    run.core.end_expired()
    assert run.core.num_live == 1


def test_a_frontend_that_has_lost_its_connection_sends_its_streams_again() -> None:
    run = driver()
    run.add(1, range(5), max_tokens=50, resumable=stream("k", 1))
    step(run)
    run.core.abort_frontend(b"a")
    again = run.live[1].message
    assert run.core.add(again, b"a2") is None
    assert run.core.num_live == 1 and list(step(run)) == [b"a2"]


def test_a_replay_brings_the_sequences_that_have_ended() -> None:
    """As its engine has ended, the other one knows nothing of them."""
    run = driver()
    ended = EndedSequence(4, pack_ids([1, 2]), int(FinishReason.EOS), 2)
    replay = Resumable("k", b"form", 4, 2, [ended])
    run.add(5, range(6), max_tokens=9, resumable=replay, prompt_length=4)
    step(run)
    claimed = claim(run, "k", b"b")
    assert claimed.ended == [ended]
    assert len(claimed.requests[0].sequences[0].output_ids) == 12  # two of the earlier run
    request = Decoder[AddRequest](AddRequest).decode(claimed.requests[0].request)
    assert request.prompt_ids == pack_ids(range(4))


def test_a_key_of_another_frontend_is_refused() -> None:
    run = driver()
    run.add(1, range(5), max_tokens=9, resumable=stream("k", 1))
    refusal = run.add(2, range(5), max_tokens=9, frontend=b"b", resumable=stream("k", 2))
    assert "key of its stream is in use" in refusal
    assert run.core.num_live == 1


def test_another_server_takes_streams_with_their_tokens_and_they_end_here() -> None:
    clock = Clock()
    run = driver(clock)
    run.add(1, range(5), max_tokens=6, resumable=stream("a", 1))
    run.add(2, range(5), max_tokens=6, resumable=stream("b", 2))
    run.add(3, range(5), max_tokens=6)
    step(run)
    clock.now += 3.0
    run.core.abort_frontend(b"a")
    clock.now += 10.0
    found, left = run.core.take_streams()
    assert left == 0 and [each.key for each in found] == ["a", "b"]
    assert [each.left_s for each in found] == [GRACE_S - 10.0] * 2
    assert all(len(each.requests[0].sequences[0].output_ids) == 4 for each in found)
    assert run.core.num_live == 0 and run.core.stats().orphans == 0
    assert run.core.take_streams() == ([], 0)
    run.core.check_integrity()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_stream_whose_grammar_fails_is_forgotten(is_loaded: bool) -> None:
    """Another server would run it again, and a client would wait for it."""
    run = driver()
    grammar = Grammar(RowGrammar(b"g", [1]), 1)
    run.add(1, range(5), max_tokens=9, resumable=stream("k", 1), grammar=grammar)
    run.core.grammar_messages()
    assert [question.key for _, question in run.core.grammar_questions()] == [b"g"]
    if is_loaded:
        assert run.core.grammar_provided(GrammarBytes(b"g", b"x")) == {}
        failed = run.core.grammar_loaded(GrammarLoaded(b"g", "no memory"))
    else:
        failed = run.core.grammar_provided(GrammarBytes(b"g", bytes(MAX_SOURCE_BYTES + 1)))
    assert [end.reason for end in failed[b"a"].finished] == [FinishReason.ERROR]
    assert claim(run, "k", b"b") == Claimed(7, "k")
    assert run.core.take_streams() == ([], 0) and run.core.num_live == 0


def test_a_stream_fails_with_the_first_of_its_sequences() -> None:
    """Here one of an orphan, whose end has no reader: no client could get the others."""
    run = driver()
    run.add(1, range(5), max_tokens=50, n=2, resumable=stream("k", 1, 2))
    step(run)
    run.core.abort_frontend(b"a")
    batch = run.core.schedule()
    assert batch is not None
    assert run.core.update_from_output(run.worker.execute(batch, failing=[1])) == {}
    assert run.core.num_live == 0 and claim(run, "k", b"b") == Claimed(7, "k")
    run.core.check_integrity()


def test_results_are_not_divided_for_orphans_that_have_ended() -> None:
    clock = Clock()
    run = driver(clock)
    run.add(1, range(5), max_tokens=1, resumable=stream("k", 1))
    run.core.abort_frontend(b"a")
    assert step(run) == {} and run.core.num_live == 0
    clock.now += GRACE_S + 1
    run.core.end_expired()
    assert resumable.NO_FRONTEND not in run.core._frontends
