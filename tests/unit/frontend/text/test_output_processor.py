"""Token columns in, updates out."""

import asyncio
from array import array

import msgspec
import pytest

from atom.shared.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    FirstToken,
    LogitsProcessors,
    LogprobTable,
    PromptLogprobs,
    SampledLogprobs,
    Sampling,
    TokenDeltas,
    pack_ids,
)
from frontend.text.detokenizer import Detokenizer
from frontend.text.output_processor import SequenceOutput, TextOptions
from frontend.text.token_logprobs import LogprobColumns, PromptLogprobTrack, TokenLogprob
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.engine.text_outputs import Step, TextOutputs

TOKENIZER = tiny_tokenizer.tokenizer()
EOS = 1


def request(request_id: int) -> AddRequest:
    return AddRequest([request_id], pack_ids([5]), 100, Sampling(0.0, 0, 1.0, 0.0, seed=1), [EOS])


def processor(
    *ids: int,
    stops: list[str] | None = None,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    min_tokens: int = 0,
) -> TextOutputs:
    output = TextOutputs(TOKENIZER)
    text = TextOptions(stops or (), include_stop, skip_special_tokens)
    for request_id in ids:
        plain = request(request_id)
        processors = LogitsProcessors(min_tokens=min_tokens) if min_tokens else None
        sampling = msgspec.structs.replace(plain.sampling, logits_processors=processors)
        output.add(msgspec.structs.replace(plain, sampling=sampling), text)
    return output


def step(output: TextOutputs, rows: dict[int, list[int]], *ends: Finished) -> Step:
    ids = [token_id for new in rows.values() for token_id in new]
    counts = [len(new) for new in rows.values()]
    return output.process(TokenDeltas(1, list(rows), pack_ids(ids), counts, [], list(ends)))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_step_without_counts_has_one_id_a_row() -> None:
    output = processor(1, 2)
    a, b = encode("a")[0], encode("b")[0]
    deltas = TokenDeltas(1, [1, 2], pack_ids([a, b]), first=[FirstToken(2, 32)])
    first, second = output.process(deltas).updates
    assert (first.text, first.cached_tokens) == ("a", 0)
    assert (second.text, second.cached_tokens) == ("b", 32)


@pytest.mark.parametrize(
    ("reason", "stop_token_id", "raw"),
    [
        (FinishReason.EOS, EOS, "eos"),
        (FinishReason.STOP_TOKEN, encode("b")[0], f"stop_{encode('b')[0]}"),
    ],
)
def test_the_ending_id_counts_but_is_no_text(reason: FinishReason, stop_token_id: int, raw: str) -> None:
    output = processor(1)
    (update,) = step(output, {1: [*encode("a"), stop_token_id]}, Finished(1, reason, stop_token_id)).updates
    assert update.text == "a"
    assert update.token_ids.tolist() == [*encode("a"), stop_token_id]
    stopped_on = stop_token_id if reason is FinishReason.STOP_TOKEN else None
    assert (update.finished, update.reason, update.stop_reason) == (True, raw, stopped_on)
    assert not output.running


def test_the_last_of_max_tokens_is_text() -> None:
    (update,) = step(processor(1), {1: encode("a")}, Finished(1, FinishReason.MAX_TOKENS)).updates
    assert (update.text, update.reason) == ("a", "max_tokens")


def test_a_broken_character_appears_at_the_end() -> None:
    output = processor(1)
    ids = encode("🦊")[:2]
    (update,) = step(output, {1: ids}).updates
    assert update.text == ""
    (update,) = step(output, {}, Finished(1, FinishReason.MAX_TOKENS)).updates
    assert update.text == TOKENIZER.decode(ids)


def test_a_stop_string_ends_the_sequence_with_an_abort() -> None:
    output = processor(1, stops=["llo w"])
    ids = encode("Hello world, hello")
    updates: list[SequenceOutput] = []
    aborts: list[int] = []
    for token_id in ids:
        done = step(output, {1: [token_id]})
        updates += done.updates
        aborts += done.aborts
    assert "".join(update.text for update in updates) == "He"
    assert (updates[-1].finished, updates[-1].reason) == (True, "stop_sequence")
    assert updates[-1].stop_reason == "llo w"
    assert aborts == [1]
    assert sum(len(update.token_ids) for update in updates) < len(ids)


def test_ids_after_a_stop_string_of_the_same_step_are_dropped() -> None:
    output = processor(1, stops=["o"])
    ids = encode("no way")
    done = step(output, {1: ids})
    (update,) = done.updates
    assert update.text == "n"
    assert 0 < len(update.token_ids) < len(ids)
    assert done.aborts == [1]


def test_a_stop_string_in_the_last_token_wins_without_an_abort() -> None:
    done = step(processor(1, stops=["b"]), {1: encode("ab")}, Finished(1, FinishReason.MAX_TOKENS))
    assert (done.updates[0].text, done.updates[0].reason, done.aborts) == ("a", "stop_sequence", [])


def test_held_back_text_comes_with_the_end() -> None:
    output = processor(1, stops=["bcd"])
    assert step(output, {1: encode("ab")}).updates[0].text == "a"
    (update,) = step(output, {1: [EOS]}, Finished(1, FinishReason.EOS, EOS)).updates
    assert (update.text, update.reason) == ("b", "eos")


def test_late_tokens_are_ignored() -> None:
    output = processor(1, 2)
    del output.running[1]
    done = step(output, {1: encode("a"), 2: encode("b")}, Finished(1, FinishReason.MAX_TOKENS))
    assert [update.request_id for update in done.updates] == [2]


def test_an_error_comes_alone() -> None:
    (update,) = step(processor(1), {}, Finished(1, FinishReason.ERROR, message="bad luck")).updates
    assert (update.finished, update.reason, update.error) == (True, "error", "bad luck")


def test_without_a_tokenizer_ids_are_all_there_is() -> None:
    output = TextOutputs(None)
    output.add(request(1), TextOptions())
    (first,) = step(output, {1: [4, 5], 2: [9]}).updates
    (last,) = step(output, {1: [6]}, Finished(1, FinishReason.MAX_TOKENS)).updates
    assert (first.text, first.token_ids.tolist(), first.finished) == ("", [4, 5], False)
    assert (last.text, last.token_ids.tolist(), last.finished) == ("", [6], True)
    assert not output.running


def test_merged_updates_lose_nothing() -> None:
    output = processor(1)
    (merged,) = step(output, {1: encode("ab")}).updates
    merged.merge(step(output, {1: encode("cd")}, Finished(1, FinishReason.MAX_TOKENS)).updates[0])
    assert merged.text == "abcd"
    assert merged.token_ids.tolist() == encode("ab") + encode("cd")
    assert (merged.finished, merged.reason) == (True, "max_tokens")


def test_a_stop_string_stays_if_requested() -> None:
    (update,) = step(processor(1, stops=["o w"], include_stop=True), {1: encode("Hello world")}).updates
    assert (update.text, update.stop_reason) == ("Hello w", "o w")


@pytest.mark.parametrize(
    ("include_stop", "skip_special_tokens", "text"),
    [(False, True, "ab"), (True, True, "ab"), (False, False, "ab<s>"), (True, False, "ab<s></s>")],
)
def test_special_tokens_in_the_text(include_stop: bool, skip_special_tokens: bool, text: str) -> None:
    output = processor(1, include_stop=include_stop, skip_special_tokens=skip_special_tokens)
    end = Finished(1, FinishReason.EOS, EOS)
    (update,) = step(output, {1: [*encode("ab<s>"), EOS]}, end).updates
    assert update.text == text


def test_the_text_of_a_stop_id_stays_if_requested() -> None:
    b = encode("b")[0]
    end = Finished(1, FinishReason.STOP_TOKEN, b)
    (update,) = step(processor(1, include_stop=True), {1: [*encode("a"), b]}, end).updates
    assert update.text == "ab"


def test_the_first_tokens_end_nothing_on_a_string() -> None:
    output = processor(1, stops=["a"], min_tokens=2)
    assert step(output, {1: encode("a")}).updates[0].text == "a"
    assert step(output, {1: encode("a")}).updates[0].text == "a"
    (update,) = step(output, {1: encode("a")}).updates
    assert (update.text, update.reason) == ("", "stop_sequence")


def test_drafts_of_a_step_are_counted() -> None:
    output = processor(1, 2, 3)
    rows = {1: encode("abc"), 2: encode("d"), 3: encode("ef")}
    ids = [token_id for new in rows.values() for token_id in new]
    deltas = TokenDeltas(1, [1, 2, 3], pack_ids(ids), [3, 1, 2], num_proposed=[3, 2, 1])
    updates = output.process(deltas).updates
    assert [(one.text, one.num_proposed, one.num_accepted) for one in updates] == [
        ("abc", 3, 2),
        ("d", 2, 0),
        ("ef", 1, 1),
    ]
    updates[0].merge(updates[2])
    assert (updates[0].num_proposed, updates[0].num_accepted) == (4, 3)


def test_no_more_drafts_are_accepted_than_there_are_tokens_before_a_stop_string() -> None:
    output = processor(1, stops=["b"])
    deltas = TokenDeltas(1, [1], pack_ids(encode("abcd")), [4], num_proposed=[5])
    (update,) = output.process(deltas).updates
    assert (update.text, update.token_ids.tolist()) == ("a", encode("ab"))
    assert (update.num_proposed, update.num_accepted) == (5, 2)


class Panic(BaseException):
    """As a panic in a native extension: not an Exception."""


@pytest.mark.parametrize("error", [ValueError("broken"), Panic("broken")])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_request_whose_text_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, at_the_end: bool
) -> None:
    output = processor(1, 2, 3)
    bad = encode("b")[0]
    feed = Detokenizer.feed

    def failing(detokenizer: Detokenizer, token_id: int) -> str:
        if token_id == bad:
            raise error
        return feed(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "feed", failing)
    ends = [Finished(2, FinishReason.MAX_TOKENS)] if at_the_end else []
    done = step(output, {1: encode("a"), 2: [bad], 3: encode("c")}, *ends)
    first, failed, third = sorted(done.updates, key=lambda update: update.request_id)
    assert (first.text, third.text) == ("a", "c")
    assert (failed.finished, failed.reason, failed.text) == (True, "error", "")
    assert failed.error.startswith("the generated tokens could not be processed")
    assert done.aborts == ([] if at_the_end else [2])
    assert [update.request_id for update in step(output, {1: encode("d"), 2: [bad]}).updates] == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_what_ends_the_process_is_no_fault_of_a_request(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(detokenizer: Detokenizer, token_id: int) -> str:
        raise error

    monkeypatch.setattr(Detokenizer, "feed", failing)
    with pytest.raises(type(error)):
        step(processor(1), {1: encode("a")})


def test_broken_log_probabilities_fail_one_request() -> None:
    output = processor(1, 2)
    plain = request(3)
    sampling = msgspec.structs.replace(plain.sampling, logprobs=0)
    output.add(msgspec.structs.replace(plain, sampling=sampling), TextOptions())
    a = encode("a")[0]
    # The table has no row for the token of request 3.
    logprobs = SampledLogprobs([], LogprobTable(1, b"", b"", b""))
    done = output.process(TokenDeltas(1, [1, 3, 2], pack_ids([a, a, a]), logprobs=logprobs))
    assert {update.request_id: update.reason for update in done.updates} == {1: None, 2: None, 3: "error"}
    assert done.aborts == [3]


def test_broken_prompt_log_probabilities_fail_one_request_and_hide_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(track: PromptLogprobTrack, chunk: PromptLogprobs) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(PromptLogprobTrack, "add", broken)
    output = processor(1)
    output.add(msgspec.structs.replace(request(2), prompt_logprobs=0), TextOptions())
    a = encode("a")[0]
    chunks = [PromptLogprobs(2, 1, LogprobTable(1, b"", b"", b""))] * 2
    done = output.process(TokenDeltas(1, [1, 2], pack_ids([a, a]), prompt_logprobs=chunks))
    assert [(update.request_id, update.reason) for update in done.updates] == [(2, "error"), (1, None)]
    assert done.aborts == [2]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None], ids=["text", "ids"])
def test_prompt_logprobs_are_not_read_on_the_event_loop(
    tokenizer: Tokenizer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    row = LogprobColumns.row

    def counted(columns: LogprobColumns, index: int, top: int) -> TokenLogprob:
        read.append(index)
        return row(columns, index, top)

    monkeypatch.setattr(LogprobColumns, "row", counted)
    output = TextOutputs(tokenizer)
    output.add(msgspec.structs.replace(request(1), prompt_logprobs=0), TextOptions())

    def chunk(start: int, *ids: int) -> PromptLogprobs:
        values, ranks = array("f", [-1.0] * len(ids)), array("i", [1] * len(ids))
        table = LogprobTable(1, array("i", ids).tobytes(), values.tobytes(), ranks.tobytes())
        return PromptLogprobs(1, start, table)

    for prompt in ([chunk(1, 5, 6)], [chunk(2, 7, 8)]):  # the second one replaces position 2
        output.process(TokenDeltas(1, [], pack_ids([]), prompt_logprobs=prompt))
    (update,) = output.process(TokenDeltas(1, [1], pack_ids(encode("a")))).updates
    assert read == []
    assert len(update.prompt_logprobs) == 3
    assert [entry.token_id for entry in update.prompt_logprobs] == [5, 7, 8]
