"""The grammars of rows: which ids may come next, after reasoning, after a resumption, and where none can."""

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from msgspec import structs

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from atom.shared.messages.grammar import GrammarLoaded, GrammarSource, LoadGrammar, RowGrammar
from atom.shared.messages.worker import NewRow
from parallel.communicator import Communicator
from tests.helpers.checkpoints import tiny_tokenizer
from workers.batch.block_table import BatchLimits
from workers.batch.step_inputs import SamplingRows
from workers.grammar import library as grammar_library
from workers.grammar.compiling import compile_source, compiled
from workers.grammar.cost import MAX_TOKEN_S
from workers.grammar.followed import KEPT_OUTPUTS, FollowedGrammar
from workers.grammar.library import GrammarLibrary
from workers.grammar.row_matchers import RowMatchers
from workers.grammar.vocabulary import tokenizer_info
from workers.memory.memory_guard import MemoryGuard
from workers.sampling.sampler import Sampler

KEY, SLOW, THINK, END_THINK = b"k", b"s", "<think>", "</think>"
AMBIGUOUS = """root ::= a
a ::= a a | b
b ::= [#a-z]+ | [#a-z]* c
c ::= [#a-z]+ | \"\""""
CPU = torch.device("cpu")
EOS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("model"), tags=(THINK, END_THINK))


@pytest.fixture(scope="module")
def library(checkpoint: Checkpoint) -> Iterator[GrammarLibrary]:
    """Holds the regular expression `(yes|no)`, and a grammar that would not be admitted."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer_info(checkpoint), max_threads=1, cache_enabled=False)
    library = GrammarLibrary(checkpoint, max_rows=64, num_drafts=2)
    try:
        for key, source in (
            (KEY, compiled(GrammarSource("regex", "(yes|no)"), compiler).source),
            (SLOW, encode(GrammarSource("grammar", AMBIGUOUS))),
            (b"bad", b""),
        ):
            library.load(LoadGrammar(key, source))
            loaded = next_loaded(library)
            assert (loaded.key, bool(loaded.error)) == (key, not source)
        assert not library.is_loading
        yield library
    finally:
        library.close()


def next_loaded(library: GrammarLibrary) -> GrammarLoaded:
    deadline = time.monotonic() + 120
    while (loaded := library.next_loaded()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return loaded


def matchers(checkpoint: Checkpoint, library: GrammarLibrary) -> RowMatchers:
    return RowMatchers(library, checkpoint.vocab_size, CPU, Communicator())


NUMBERS = itertools.count(1)


def new_row(
    row: int, grammar: RowGrammar | None, output: Sequence[int] = (), number: int | None = None
) -> NewRow:
    """A row of a request of its own, unless `number` is given."""
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    number = next(NUMBERS) if number is None else number
    ids = pack_ids(output)
    return NewRow(row, 4, 0, [[0]], sampling, 4, output_ids=ids, grammar=grammar, request_id=number)


def allowed(made: RowMatchers, *rows: int) -> list[set[int]]:
    """The ids that each row may sample next; all masks are waited for."""
    deadline = time.monotonic() + 60
    while not all(made._rows[row].is_ready for row in rows):
        assert time.monotonic() < deadline
        for row in rows:
            made._rows[row].followed.update()  # type: ignore[union-attr]
    return masks_after(made, 0, *rows)


def masks_after(made: RowMatchers, num_before: int, *rows: int) -> list[set[int]]:
    """The ids that each row may sample after so many of its drafts."""
    bits = np.unpackbits(made.masks(rows, num_before).numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def sample(made: RowMatchers, rows: Sequence[int], ids: Sequence[int]) -> None:
    made.record(list(rows), torch.tensor(ids))


def letters(checkpoint: Checkpoint, text: str) -> list[int]:
    """One id for each byte."""
    tokenizer = tiny_tokenizer.build((THINK, END_THINK))
    return [tokenizer.token_to_id(letter) for letter in text]


def test_rows_follow_their_grammar_to_its_end(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    for row in (0, 5):
        made.set_row(new_row(row, RowGrammar(KEY, [EOS])))
    y, e, s, n, o = letters(checkpoint, "yesno")
    first, again = allowed(made, 0, 5)
    assert first == again
    assert {y, n} <= first
    assert EOS not in first
    sample(made, (0, 5), (y, n))
    assert allowed(made, 5) == [{o}]
    sample(made, (0, 5), (e, o))
    after_ye, after_no = allowed(made, 0, 5)
    assert (after_ye, after_no) == ({s}, {EOS})
    sample(made, (0, 5), (s, EOS))
    assert len(allowed(made, 5)[0]) >= checkpoint.vocab_size  # what comes now is dropped
    assert made.failures([0, 5]) == {}


def test_drafts_have_masks_of_their_own(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    for row in (0, 5):
        made.set_row(new_row(row, RowGrammar(KEY, [EOS])))
    y, e, s, n, o = letters(checkpoint, "yesno")
    drafts = torch.full((6, 2), -1)
    drafts[0] = torch.tensor([e, s])
    drafts[5, 0] = y
    all_kept = torch.ones(2, dtype=torch.bool)
    made.record((0, 5), torch.tensor([y, n]), all_kept)
    made.propose(drafts)
    assert allowed(made, 0, 5) == [{e}, {o}]
    assert masks_after(made, 1, 0, 5)[0] == {s}
    assert len(masks_after(made, 1, 5)[0]) >= checkpoint.vocab_size  # the grammar refuses the draft
    assert masks_after(made, 2, 0) == [{EOS}]

    # The first row accepts one draft and not what follows it; the second row has sampled an id for a draft
    # that is not accepted.
    made.record((0, 5), torch.tensor([e, o]), all_kept)
    made.record((0, 5), torch.tensor([s, o]), torch.tensor([True, False]))
    made.record((0,), torch.tensor([EOS]), torch.tensor([False]))
    made.propose(torch.full((6, 2), -1))
    assert allowed(made, 0, 5) == [{EOS}, {EOS}]
    assert made.failures([0, 5]) == {}


def test_a_resumed_row_goes_on(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    y, e, s = letters(checkpoint, "yes")
    made.set_row(new_row(3, RowGrammar(KEY, [EOS]), [y, e]))
    assert allowed(made, 3) == [{s}]
    made.set_row(new_row(3, None))
    assert not made.rows


def test_an_id_outside_of_the_grammar_ends_the_row_alone(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    made = matchers(checkpoint, library)
    for row in (0, 1):
        made.set_row(new_row(row, RowGrammar(KEY, [EOS])))
    n, o = letters(checkpoint, "no")
    sample(made, (0, 1), (o, n))
    assert allowed(made, 1) == [{o}]
    assert list(made.failures([0, 1])) == [0]


def test_an_id_of_the_last_step_belongs_to_the_earlier_request(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    made = matchers(checkpoint, library)
    made.set_row(new_row(0, RowGrammar(KEY, [EOS])))
    n, _ = letters(checkpoint, "no")
    sample(made, [0], [n])
    made.set_row(new_row(0, RowGrammar(KEY, [EOS])))
    assert n in allowed(made, 0)[0]


def test_the_grammar_begins_after_the_reasoning(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    think, end = 2, 3
    y, e, s = letters(checkpoint, "yes")
    inside = RowGrammar(KEY, [EOS], in_reasoning=True, reasoning_end=end)
    optional = RowGrammar(KEY, [EOS], reasoning_begin=think, reasoning_end=end)
    for row, grammar in enumerate((inside, optional, optional)):
        made.set_row(new_row(row, grammar))
    free, first, _ = allowed(made, 0, 1, 2)
    assert {s, EOS, end} <= free
    assert {y, think} <= first
    assert s not in first
    sample(made, (0, 1, 2), (s, think, y))
    free, also_free, second = allowed(made, 0, 1, 2)
    assert free == also_free
    assert second >= {e}
    assert think not in second
    sample(made, (0, 1), (end, end))
    for after in allowed(made, 0, 1):
        assert y in after
        assert s not in after
        assert think not in after
    made.set_row(new_row(0, inside, [s, end, y, e]))
    assert allowed(made, 0) == [{s}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_output_ends_where_its_settings_exclude_every_id(
    checkpoint: Checkpoint, library: GrammarLibrary, temperature: float
) -> None:
    sampler = Sampler(BatchLimits(2, 64, 4), checkpoint.vocab_size, CPU, MemoryGuard(CPU, 1), library)
    (y,) = letters(checkpoint, "y")
    excluding = LogitsProcessors(allowed_ids=pack_ids([EOS]))  # which cannot begin "yes" or "no"
    for row, processors in enumerate((None, excluding)):
        new = new_row(row, RowGrammar(KEY, [0, EOS, 3]))  # 0 is the smallest id, the argmax of no logits
        sampling = structs.replace(new.sampling, temperature=temperature, logits_processors=processors)
        sampler.set_row(structs.replace(new, sampling=sampling))
    logits_RV = torch.full((2, checkpoint.vocab_size), -50.0)
    logits_RV[:, y] = 50.0
    rows_R = torch.arange(2)
    rows = SamplingRows(np.arange(2), rows_R, rows_R, np.full(2, 4), torch.full((2,), 4))
    allowed(sampler._matchers, 0, 1)
    assert sampler.sample(logits_RV, rows).ids_R.tolist() == [y, 2]
    allowed(sampler._matchers, 0, 1)
    failures = sampler.sample(logits_RV, rows).refused
    assert failures.keys() == {1} and "exclude all of them" in failures[1]


def test_special_tokens_are_in_no_text(checkpoint: Checkpoint) -> None:
    import xgrammar

    info = tokenizer_info(checkpoint)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    sources = [GrammarSource("regex", "(.|[^a])*"), GrammarSource("json_object", "")]
    rule = ["A", {"type": "const_string", "value": "b"}]
    for free in (
        {"type": "any_text", "excludes": ["A"]},
        {"type": "dispatch", "rules": [rule]},
        {"type": "json_schema", "json_schema": {"type": "object"}, "style": "qwen_xml"},
        {"type": "qwen_xml_parameter", "json_schema": {"type": "object"}},
    ):
        sources.append(
            GrammarSource("structural_tag", json.dumps({"type": "structural_tag", "format": free}))
        )
    mask = xgrammar.allocate_token_bitmask(1, checkpoint.vocab_size)
    for source in sources:
        matcher = xgrammar.GrammarMatcher(compile_source(source, compiler)[0])
        if "xml" in source.text:
            assert matcher.accept_string("<parameter=a>")
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        assert {0, 1, 2, 3} & {*allowed.tolist()} <= {EOS}, source
        assert len(allowed)


def test_a_grammar_that_takes_long_delays_no_other(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = GrammarLibrary(checkpoint, max_rows=2)
    gate = threading.Event()

    def load(message: LoadGrammar) -> FollowedGrammar:
        assert message.key != b"slow" or gate.wait(60)
        raise ValueError("it was tried")

    monkeypatch.setattr(library, "_load", load)
    for key in (b"slow", b"quick"):
        library.load(LoadGrammar(key, b""))
    assert next_loaded(library).key == b"quick"
    gate.set()
    assert next_loaded(library).key == b"slow"
    library.close()


def test_a_grammar_must_be_loaded(checkpoint: Checkpoint) -> None:
    with pytest.raises(KeyError):
        GrammarLibrary(checkpoint, max_rows=2).followed(b"none")


def test_a_resumed_request_is_followed_where_it_was(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    y, e, s = letters(checkpoint, "yes")
    made.set_row(new_row(0, RowGrammar(KEY, [EOS]), number=-1))
    allowed(made, 0)
    sample(made, [0], [y])
    output = made._rows[0].output
    assert output is not None
    serial = output.serial
    made.set_row(new_row(4, RowGrammar(KEY, [EOS]), [y], number=-1))  # in another row
    made.set_row(new_row(0, None))
    assert made._rows[4].output is output and output.serial == serial
    assert allowed(made, 4) == [{e}]
    made.set_row(new_row(4, RowGrammar(KEY, [EOS]), [y, e], number=-1))
    assert allowed(made, 4) == [{s}]
    made.set_row(new_row(4, RowGrammar(KEY, [EOS]), [], number=-1))  # its tokens were dropped
    assert y in allowed(made, 4)[0]


def test_outputs_without_a_row_are_forgotten(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    for _ in range(5 * KEPT_OUTPUTS):
        made.set_row(new_row(0, RowGrammar(KEY, [EOS])))
    outputs = library.followed(KEY)._outputs.values()
    assert sum(output.row is None for output in outputs) == KEPT_OUTPUTS
    allowed(made, 0)
    made.set_row(new_row(0, None))


def test_a_row_without_its_mask_is_late_and_delays_no_other(
    checkpoint: Checkpoint, library: GrammarLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = matchers(checkpoint, library)
    (a,) = letters(checkpoint, "a")
    y, e = letters(checkpoint, "ye")
    monkeypatch.setattr(library.followed(SLOW), "update", lambda: None)  # however soon the mask is made
    made.set_row(new_row(0, RowGrammar(SLOW, [EOS]), [a] * 70))
    made.set_row(new_row(1, RowGrammar(KEY, [EOS])))
    assert y in allowed(made, 1)[0]
    bits = np.unpackbits(made.masks([0, 1]).numpy().view(np.uint8), axis=1, bitorder="little")
    assert made.late([0, 1]) == [0] and made.failures([0, 1]) == {}
    assert bits[0].all() and not bits[1].all()
    assert library.followed(SLOW).is_slow  # and is waited for no more
    sample(made, (0, 1), (EOS, y))  # what a late row samples does not count
    assert allowed(made, 1) == [{e}]
    assert made.late([0]) == [0]
    made.set_row(new_row(0, None))


def test_a_process_that_takes_too_long_ends_and_its_rows_fail(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    """At once: the kernel has ended it by its limit, and not for what others do."""
    made = matchers(checkpoint, library)
    (a,) = letters(checkpoint, "a")
    made.set_row(new_row(0, RowGrammar(SLOW, [EOS]), [a]))
    made.set_row(new_row(1, RowGrammar(SLOW, [EOS]), [a] * 3000))
    made.set_row(new_row(2, RowGrammar(KEY, [EOS])))
    allowed(made, 2)
    until_dead(made, library)
    assert made.late([0, 1, 2]) == [0, 1]
    reported = next_loaded(library)
    assert reported.key == SLOW and reported.is_refused and "too ambiguous" in reported.error
    assert not library.is_loading
    library.drop(SLOW)
    assert len(allowed(made, 2)[0]) < checkpoint.vocab_size


def until_dead(made: RowMatchers, library: GrammarLibrary) -> None:
    """Returns once the death of a row's grammar was noticed."""
    deadline = time.monotonic() + 60
    while not library.is_loading:
        assert time.monotonic() < deadline
        made.masks(sorted(made.rows))


def test_a_grammar_whose_own_process_was_killed_is_loaded_again(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    y, e, s = letters(checkpoint, "yes")
    source = encode(GrammarSource("regex", "(yes|no)"))
    library.load(LoadGrammar(b"own", source))
    assert next_loaded(library) == GrammarLoaded(b"own")
    made = matchers(checkpoint, library)
    made.set_row(new_row(0, RowGrammar(b"own", [EOS]), number=-19))
    assert y in allowed(made, 0)[0]
    parent = library._forks.pid
    assert parent is not None
    os.kill(library.followed(b"own").pid, signal.SIGKILL)
    until_dead(made, library)
    assert next_loaded(library) == GrammarLoaded(b"own", is_lost=True)
    assert library._forks.pid == parent
    library.load(LoadGrammar(b"own", source))
    assert next_loaded(library) == GrammarLoaded(b"own")
    made.set_row(new_row(0, RowGrammar(b"own", [EOS]), [y, e], number=-19))
    assert allowed(made, 0) == [{s}]
    os.kill(library.followed(b"own").pid, signal.SIGKILL)
    until_dead(made, library)
    assert next_loaded(library).is_refused, "it was killed twice"
    made.set_row(new_row(0, None))
    library.drop(b"own")


def test_ambiguous_grammars_are_refused(checkpoint: Checkpoint) -> None:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer_info(checkpoint), max_threads=1, cache_enabled=False)
    for source in (
        GrammarSource("grammar", AMBIGUOUS.replace("[#a-z]*", "([#a-z]* [#a-z]*)* ")),
        GrammarSource("regex", "(([a-z]{0,50}){0,50}){0,50}"),
    ):
        made = compiled(source, compiler)
        assert "too ambiguous" in made.error, made.error
    made = compiled(GrammarSource("json_object", ""), compiler)
    assert not made.error and 0 < made.token_us < 1e6 * MAX_TOKEN_S


def test_a_long_output_is_resumed_in_pieces(checkpoint: Checkpoint, library: GrammarLibrary) -> None:
    made = matchers(checkpoint, library)
    think, end = 2, 3
    y, e, s = letters(checkpoint, "yes")
    inside = RowGrammar(KEY, [EOS], in_reasoning=True, reasoning_end=end)
    made.set_row(new_row(0, inside, [s] * 5000 + [end, y], number=-5))
    made.set_row(new_row(1, RowGrammar(KEY, [EOS])))
    assert y in allowed(made, 1)[0] and think not in allowed(made, 1)[0]
    assert allowed(made, 0) == [{e}]
    made.set_row(new_row(0, inside, [s] * 5000 + [end, y, e], number=-5))
    assert allowed(made, 0) == [{s}]


def test_a_late_answer_is_not_that_of_the_next_output_of_its_slot(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    followed = library.followed(KEY)
    (o,) = letters(checkpoint, "o")
    lost = followed.follow(-7, 0, RowGrammar(KEY, [EOS]), [o])  # outside of the grammar
    followed.release(lost, 0)
    followed._forget(followed._outputs.pop(-7))
    after = followed.follow(-8, 0, RowGrammar(KEY, [EOS]), [])
    assert after.slot == lost.slot
    deadline = time.monotonic() + 60
    while not after.is_ready:
        assert time.monotonic() < deadline
        followed.update()
        assert not after.failure
    followed.release(after, 0)


def test_a_grammar_whose_process_was_killed_is_loaded_again(
    checkpoint: Checkpoint, library: GrammarLibrary
) -> None:
    """The process that forks, and so all forks: no grammar is at fault. Rows are late until then."""
    y, e, s = letters(checkpoint, "yes")
    made = matchers(checkpoint, library)
    made.set_row(new_row(0, RowGrammar(KEY, [EOS]), number=-9))
    assert y in allowed(made, 0)[0]
    pid = library._forks.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not library.is_loading:
        assert time.monotonic() < deadline
        made.masks([0])
    assert made.late([0]) == [0] and not made.failures([0])
    assert next_loaded(library) == GrammarLoaded(KEY, is_lost=True)
    made.masks([0])
    assert not library.is_loading  # it is said once
    library.load(LoadGrammar(KEY, encode(GrammarSource("regex", "(yes|no)"))))
    assert next_loaded(library) == GrammarLoaded(KEY)
    made.masks([0])
    assert made.late([0]) == [0] and not library.is_loading
    made.set_row(new_row(0, RowGrammar(KEY, [EOS]), [y, e], number=-9))
    assert allowed(made, 0) == [{s}]
    made.set_row(new_row(0, None))


def test_a_grammar_is_loaded_though_the_process_is_killed_meanwhile(
    library: GrammarLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(connection: socket.socket) -> bytes:
        monkeypatch.undo()
        pid = library._forks.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert read_frame(connection) == b""
        return b""

    read_frame = grammar_library.read_frame
    monkeypatch.setattr(grammar_library, "read_frame", killed)
    monkeypatch.setattr(grammar_library, "write_frame", lambda *given: None)  # so that it does not answer
    library.load(LoadGrammar(b"new", encode(GrammarSource("regex", "(yes|no)"))))
    assert next_loaded(library) == GrammarLoaded(b"new")
    library.drop(b"new")
