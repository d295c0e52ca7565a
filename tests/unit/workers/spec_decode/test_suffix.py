"""Suffix speculation: the plain run's output, drafts from recent outputs, and a bounded memory."""

import random
from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom_ops import (
    NO_DRAFT,
    NgramRule,
    RecentOutputs,
    RowState,
    TokenHistory,
    propose_suffixes,
    record_outputs,
)
from tests.helpers.checkpoints.tiny_models import place, prompt_of, save_tiny, tiny
from tests.helpers.engine.drafting import PLAIN, check_few_blocks, drafting_engine, rarely, unchanging
from tests.helpers.engine.drafting_steps import SETTINGS, DraftingSteps, check_repeated, simulate_gpu
from tests.helpers.engine.varied_requests import check, run
from tests.helpers.engine.whole_engine import WholeEngine
from tests.unit.workers.spec_decode.test_speculation import Driver, runner
from workers.batch.block_table import BatchLimits, BlockTable
from workers.spec_decode import suffix
from workers.spec_decode.proposer import Proposer
from workers.spec_decode.suffix import (
    KEPT_TOKENS,
    LONGEST,
    MOST_PLACES,
    SuffixProposer,
    most_common,
    own_places,
    recent_places,
)
from workers.spec_decode.text_history import TextGroup

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DRAWN = ("greedy", "limited")
FAMILIES = ("llama-gqa", "mistral-window", "gpt-oss")
SUFFIX = unchanging(SpeculativeConfig("suffix", 4))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_output_is_the_plain_runs(checkpoints: dict[str, Checkpoint], name: str) -> None:
    plain = drafting_engine(checkpoints[name], PLAIN)
    made = drafting_engine(checkpoints[name], SUFFIX)
    wanted = run(plain, 30)
    check(run(made, 30, wanted), wanted)
    stats = made.core.stats()
    assert sum(stats.num_accepted_tokens_per_pos) > 0.1 * stats.num_draft_tokens > 10
    assert stats.steps < plain.core.stats().steps


def test_preempted_and_cached_requests(checkpoints: dict[str, Checkpoint]) -> None:
    check_few_blocks(checkpoints["llama-gqa"], SUFFIX, blocks=36, requests=40)


def steps_of(made: WholeEngine, number: int, salt: str = "") -> int:
    """Steps of one request, whose text has nothing to look up."""
    before = made.core.stats().steps
    made.add(number, prompt_of(12, seed=4), 24, cache_salt=salt)
    made.run()
    return made.core.stats().steps - before


def test_outputs_of_other_requests_are_drafted(checkpoints: dict[str, Checkpoint]) -> None:
    made = drafting_engine(checkpoints["mistral-window"], SUFFIX)
    first = steps_of(made, 0)
    assert steps_of(made, 1) < 0.7 * first
    assert made.outputs[1].token_ids == made.outputs[0].token_ids


def test_a_request_with_a_salt_shares_no_output(checkpoints: dict[str, Checkpoint]) -> None:
    """Neither do others have drafts of its output, nor has it drafts of theirs."""
    made = drafting_engine(checkpoints["mistral-window"], SUFFIX)
    private = steps_of(made, 0, salt="mine")
    assert steps_of(made, 1) == private
    assert steps_of(made, 2, salt="mine") == private


def places_of(text: list[int], tail: list[int], most: int) -> tuple[int, list[list[int]]]:
    """The longest match by definition, and what follows each of its places."""
    for length in range(min(len(tail), LONGEST), 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == tail[-length:]]
        if ends:
            return length, [text[end : end + most] for end in ends]
    return 0, []


def test_the_longest_match_of_a_text() -> None:
    source = random.Random(2)
    lengths = set()
    for _ in range(300):
        text = [source.randrange(3) for _ in range(source.randrange(1, 60))]
        found = own_places(np.array(text, np.int32), 4)
        length, places = places_of(text, text, 4)
        assert found == (length, places[-MOST_PLACES:])
        lengths.add(length)
    assert lengths >= {0, 2, 5}
    gap = np.array([5, 6, -1, 7, 5, 6], np.int32)
    assert own_places(gap, 3) == (2, [[-1, 7, 5]])


class Outputs:
    """Recent outputs by definition: each is a list of (number, token). Row 3 is private."""

    def __init__(self, kept: int, rows: int):
        self.recent = RecentOutputs.empty(kept, rows, CPU)
        self.last: dict[int, list[tuple[int, int]]] = {}
        self.texts: list[list[tuple[int, int]]] = []
        self.total = 0
        self._kept = kept
        self.recent.last_N[3] = RecentOutputs.first(private=True)

    def start(self, row: int) -> None:
        """A new request in a row."""
        self.last[row] = []
        self.texts.append(self.last[row])
        self.recent.last_N[row] = RecentOutputs.first(private=False)

    def add(self, rows: list[int], ids: list[list[int]], counts: list[int]) -> None:
        record_outputs(torch.tensor(ids), torch.tensor(counts), torch.tensor(rows), self.recent)
        for row, tokens, count in zip(rows, ids, counts, strict=True):
            for token in tokens[: count * (row != 3)]:
                self.last[row].append((self.total, token))
                self.total += 1

    def places(self, tail: list[int], most: int) -> tuple[int, list[list[int]]]:
        """The longest match of `tail`, and what follows each of its places, the latest last."""
        found: list[tuple[int, int, list[int]]] = []
        for text in self.texts:
            kept = [(number, token) for number, token in text if number >= self.total - self._kept]
            tokens = [token for _, token in kept]
            for end in range(1, len(kept)):
                pairs = zip(tokens[end - 1 :: -1], tail[::-1], strict=False)
                same = takewhile(lambda pair: pair[0] == pair[1], pairs)
                found.append((len(list(same)), kept[end - 1][0], tokens[end : end + most]))
        best = max((length for length, *_ in found), default=0)
        if best < 2:
            return 0, []
        return best, [after for length, _, after in sorted(found) if length == best]


def random_outputs(source: random.Random, steps: int) -> Outputs:
    """What four rows have sampled, three of them for several requests."""
    outputs = Outputs(128, 4)
    for row in range(3):
        outputs.start(row)
    for _ in range(steps):
        rows = source.sample(range(4), 4)
        ids = [[source.randrange(3) for _ in range(4)] for _ in rows]
        outputs.add(rows, ids, [source.randrange(5) for _ in rows])
        if source.random() < 0.1:
            outputs.start(source.randrange(3))
    return outputs


@pytest.mark.parametrize("steps", [0, 8, 60])
def test_the_longest_match_of_recent_outputs(steps: int) -> None:
    """Also when most of them are overwritten."""
    source = random.Random(3)
    outputs = random_outputs(source, steps)
    lengths = set()
    for _ in range(200):
        tail = [source.randrange(3) for _ in range(source.randrange(1, 9))]
        length, found = recent_places(np.array(tail, np.int32), outputs.recent, 3)
        wanted_length, wanted = outputs.places(tail, 3)
        assert (length, found) == (wanted_length, wanted[-MOST_PLACES:]), tail
        lengths.add(length)
    assert len(lengths) > 3 or not steps


def history_of(texts: list[list[int]], block_size: int = 4, width: int = 12) -> TokenHistory:
    """Texts without predictions."""
    rows = len(texts)
    ids = torch.zeros(rows, width * block_size, dtype=torch.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    return TokenHistory(
        ids.flatten(),
        torch.arange(rows * width, dtype=torch.int32).view(rows, width),
        torch.zeros(rows, 0, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        block_size,
    )


def test_what_a_gpu_drafts() -> None:
    """The longer match counts, of equal ones the row's own, and of its places the latest."""
    source = random.Random(7)
    kinds = Counter[str]()
    for _ in range(60):
        outputs = random_outputs(source, source.randrange(30))
        texts = [[source.randrange(3) for _ in range(source.randrange(1, 40))] for _ in range(4)]
        limits = [len(text) + source.randrange(6) for text in texts]
        last = torch.tensor([len(text) - 1 for text in texts])
        ids = torch.tensor([text[-1] for text in texts])
        state = RowState(ids, last, torch.tensor(limits), torch.zeros(4, 4, dtype=torch.int64))
        rule = NgramRule(6, 2)
        propose_suffixes(torch.arange(4), state, history_of(texts), outputs.recent, rule, 48)
        for row, text in enumerate(texts):
            own, places = places_of(text, text[-6:], 4)
            other, others = (0, []) if row == 3 else outputs.places(text[-6:], 4)
            kinds["own" if own >= other else "other"] += 1
            length, places = (own, places) if own >= other else (other, others)
            drafts = places[-1] if places else []
            drafts = drafts[: max(min(length, limits[row] - len(text) - 1), 0)]
            assert state.drafts_NK[row].tolist() == drafts + [NO_DRAFT] * (4 - len(drafts))
            kinds["drafts"] += len(drafts)
    assert kinds["own"] > 50 and kinds["other"] > 50 and kinds["drafts"] > 200, kinds


def test_the_memory_is_bounded() -> None:
    """It is allocated at start, whatever requests come."""
    for rows, kept in ((256, KEPT_TOKENS), (4096, 2 * 4097 * 33)):
        limits = BatchLimits(rows, 64, 4, 32)
        made = SuffixProposer(TextGroup(0, 0), BlockTable(limits), 8, limits, CPU)
        recent = made._recent
        assert sum(part.nbytes for part in (recent.ids_O, recent.before_O, recent.after_O)) == 20 * kept
        assert len(recent.last_N) == rows + 1


@pytest.fixture(scope="module")
def plain() -> Driver:
    made = Driver(runner(0), 0, 1)
    made.run()
    return made


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("pauses", [False, True], ids=["always", "pauses"])
@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 6], [3]], ids=["eager", "graphs", "some graphs"])
def test_a_host_that_does_not_know_the_last_tokens(
    plain: Driver, monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None, in_flight: int, pauses: bool
) -> None:
    """As on a GPU. Rows are used again; with `pauses` some steps have no drafts."""
    monkeypatch.setattr(suffix, "KEPT_TOKENS", 128)

    def looks_up(limits: BatchLimits, tables: list[BlockTable], exact: bool) -> Proposer:
        return SuffixProposer(TextGroup(0, 0), tables[0], 120, limits, CPU, exact)

    driver = Driver(runner(3, False, sizes, [3, 0] if pauses else (), looks_up), 3, in_flight)
    driver.turns = random.Random(3) if pauses else None
    assert driver.run() == plain.outputs
    assert driver.steps < (0.98 if pauses else 0.95) * plain.steps
    speculation = driver._made._inputs.speculation
    assert speculation is not None and speculation.state.positions_N[-1] == -1


def gpu_steps(
    checkpoint: Checkpoint, speculative: SpeculativeConfig, sizes: str = "[1,2,4,8]"
) -> DraftingSteps:
    device = DeviceConfig(
        device="cpu", cpu_threads=1, cudagraph_capture_sizes=sizes, cudagraph_mode="FULL_DECODE_ONLY"
    )
    return DraftingSteps(checkpoint, device, place(), speculative)


@pytest.mark.parametrize("name", [FAMILIES[0], *map(rarely, FAMILIES[1:])])
def test_recent_outputs_are_drafted_in_graphs(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What `tests/gpu/test_speculation.py` does on a GPU: outputs that are repeated take fewer steps."""
    wanted = {setting: gpu_steps(checkpoints[name], PLAIN, "[]").run(SETTINGS[setting]) for setting in DRAWN}
    simulate_gpu(monkeypatch)
    monkeypatch.setattr(suffix, "KEPT_TOKENS", 1024)
    for setting, tokens in wanted.items():
        for in_flight in (1, 2):
            made = gpu_steps(checkpoints[name], SUFFIX)
            check_repeated(made, SETTINGS[setting], in_flight, tokens)


def test_most_places_decide_and_the_last_on_a_tie() -> None:
    assert most_common([[1, 2], [1, 3], [4, 4]], 3) == [1, 3]
    assert most_common([[1], [2]], 3) == [2]
    assert most_common([[1, -1, 5]], 3) == [1]
    assert most_common([[1, 2, 3]], 2) == [1, 2]
    assert most_common([], 2) == []
