"""An engine core without an engine: real messages over a real socket, scripted tokens."""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from atom.shared.messages.admin import AbortNamed, Done
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    Finished,
    FinishReason,
    FirstToken,
    GetStats,
    Hello,
    LogprobTable,
    PromptLogprobs,
    SampledLogprobs,
    ToCore,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.shared.messages.grammar import GetGrammar, GrammarBytes
from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.profile import Profile, ProfileResult
from atom.shared.messages.resume import Claim, Claimed, ClaimedRequest, ClaimedSequence, EndedSequence

DEADLINE_S = 60.0
VOCABULARY = 360


def likely(token_id: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens at a token's position: even ids are the first, odd ones the second."""
    first = [token_id, token_id + 1] if token_id % 2 == 0 else [token_id + 1, token_id]
    ids = [*first, *(token_id + step for step in range(2, count))]
    return [(i % VOCABULARY, -0.25 * rank) for rank, i in enumerate(ids[:count], 1)]


def logprob(token_id: int) -> float:
    """The log probability of the token itself."""
    return dict(likely(token_id, 2))[token_id]


def table(ids: Sequence[int], top: int) -> LogprobTable:
    """The columns for these tokens; wider than requested, as in a mixed batch."""
    shown, values = array("i"), array("f")
    for token_id in ids:
        others = likely(token_id, top + 1)
        shown.extend([token_id, *(other for other, _ in others)])
        values.extend([logprob(token_id), *(value for _, value in others)])
    ranks = pack_ids(1 + token_id % 2 for token_id in ids)
    return LogprobTable(top + 2, shown.tobytes(), values.tobytes(), ranks)


@dataclass
class Script:
    """The output of one request: its ids, `per_step` at a time, then its end (None: never)."""

    ids: list[int]
    reason: FinishReason | None = FinishReason.MAX_TOKENS
    stop_token_id: int = -1
    message: str = ""
    cached: int = 0
    per_step: int = 1
    drafts: int = 0
    """Draft tokens that each step verifies."""
    dies_after: int = -1
    """Tokens after which the core dies of the request; -1: never."""
    leased: LeasedBlocks | None = None
    """What the core keeps of the prompt."""


@dataclass
class _Running:
    peer: bytes
    request: AddRequest
    script: Script
    sent: int = 0


@dataclass
class FakeCore:
    """Serves every request by `script`; `requests` and `aborted` hold what was received."""

    directory: Path
    script: Callable[[AddRequest], Script]
    max_model_len: int = 2048
    is_ready: bool = True
    step_s: float = 0.0005
    requests: list[AddRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    profile: Callable[[Profile], ProfileResult | None] = lambda message: None
    profiles: list[Profile] = field(default_factory=list)
    waits: Callable[[], bool] = lambda: False
    """While it returns true, no tokens are generated."""
    rank: int = 0
    life: int = 0
    grammars: list[GrammarBytes] = field(default_factory=list)
    """Those that frontends have sent: each is asked for with its first request."""
    abort_reasons: dict[int, FinishReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.endpoint = f"ipc://{self.directory}/core-{self.rank}.{self.life}"
        self.address = EngineAddress(self.rank, self.life, self.endpoint)
        self._running: dict[int, _Running] = {}
        self._resumable: dict[str, dict[int, _Running]] = {}
        self._ended: dict[str, list[EndedSequence]] = {}
        self._peers: set[bytes] = set()
        self._asked: set[bytes] = set()
        self._stop = threading.Event()
        self._death: str | None = None
        self.frozen = threading.Event()
        """While set, the core neither receives nor sends: as after SIGSTOP."""
        self._is_frozen = threading.Event()
        self._dropped = ""
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="fake-core")

    def __enter__(self) -> "FakeCore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def freeze(self) -> None:
        """Returns once the core has stopped; `frozen.clear()` lets it go on."""
        self.frozen.set()
        self.wait_for(self._is_frozen.is_set)

    def drop_frontends(self, reason: str) -> None:
        """Send CoreDead and stay, as a core does whose frontend did not read its tokens."""
        self._dropped = reason

    def die(self, reason: str) -> None:
        """Send CoreDead and end."""
        self._death = reason
        self._stop.set()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; fails the test when it does not in time."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the fake core did not receive it in time"
            time.sleep(0.002)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 200)
            socket.bind(self.endpoint)
            decoder = Decoder[ToCore](ToCore)
            while not self._stop.is_set():
                while self.frozen.is_set() and not self._stop.is_set():
                    self._is_frozen.set()
                    time.sleep(0.002)
                self._is_frozen.clear()
                while socket.poll(1):
                    peer, frame = socket.recv_multipart()
                    self._process(socket, peer, decoder.decode(frame))
                if self._dropped:
                    for peer in self._peers:
                        socket.send_multipart([peer, encode(CoreDead(self._dropped))])
                    self._dropped = ""
                    self._peers.clear()
                    self._running.clear()
                if not self.waits():
                    self._advance(socket)
                time.sleep(self.step_s)
            if self._death is not None:
                for peer in self._peers:
                    socket.send_multipart([peer, encode(CoreDead(self._death))])

    def _process(self, socket: zmq.Socket[bytes], peer: bytes, message: ToCore) -> None:
        match message:
            case Hello():
                self._peers.add(peer)
                if self.is_ready:
                    ready = CoreReady(self.max_model_len, kv_tokens=100_000)
                    socket.send_multipart([peer, encode(ready)])
            case AddRequest():
                if message.grammar is not None and (key := message.grammar.row.key) not in self._asked:
                    self._asked.add(key)
                    socket.send_multipart([peer, encode(GetGrammar(key))])
                for index, request_id in enumerate(message.request_ids):
                    request = _sequence(message, request_id, index)
                    self.requests.append(request)
                    sent = len(request.prompt_ids) // 4 - request.num_prompt_ids
                    running = _Running(peer, request, self.script(request), sent)
                    self._running[request_id] = running
                    if request.resumable is not None:
                        self._resumable.setdefault(request.resumable.key, {})[request_id] = running
                        self._ended[request.resumable.key] = request.resumable.ended
            case GrammarBytes():
                self.grammars.append(message)
            case GetStats():
                socket.send_multipart([peer, encode(self._stats())])
            case Profile():
                self.profiles.append(message)
                if (response := self.profile(message)) is not None:
                    socket.send_multipart([peer, encode(response)])
            case Claim():
                self._claimed(socket, peer, message)
            case Abort(request_ids, reason):
                self.abort_reasons.update(dict.fromkeys(request_ids, reason))
                self.aborted.extend(request_ids)
                for request_id in request_ids:
                    self._running.pop(request_id, None)
            case AbortNamed(number, names, everything, tenant):
                count = self._abort_named(socket, names if not everything else None, tenant)
                socket.send_multipart([peer, encode(Done(number, count))])

    def _claimed(self, socket: zmq.Socket[bytes], peer: bytes, message: Claim) -> None:
        """Give a stream to another frontend. It is kept as long as this core."""
        found = self._resumable.get(message.key, {})
        claimed = Claimed(message.number, message.key, [], list(self._ended.get(message.key, ())))
        for number, running in found.items():
            request = running.request
            if request.tenant != message.tenant:
                continue
            ids = pack_ids(running.script.ids[: running.sent])
            sequences = [ClaimedSequence(number, ids, running.script.cached)]
            if number in self._running:
                if running.peer != peer:
                    ends = [Finished(number, FinishReason.REFUSED, message="it was resumed elsewhere")]
                    deltas = TokenDeltas(self.steps, [], b"", finished=ends)
                    socket.send_multipart([running.peer, encode(deltas)])
                running.peer = peer
            elif running.script.reason is not None:
                reason = int(self.abort_reasons.get(number, running.script.reason))
                stop = running.script.stop_token_id
                claimed.ended.append(EndedSequence(number, ids, reason, stop, running.script.cached))
                sequences = []
            claimed.requests.append(ClaimedRequest(encode(request), sequences))
        socket.send_multipart([peer, encode(claimed)])

    def _abort_named(self, socket: zmq.Socket[bytes], names: list[str] | None, tenant: str | None) -> int:
        found = [
            (request_id, running)
            for request_id, running in self._running.items()
            if (names is None or running.request.name in names) and tenant in (None, running.request.tenant)
        ]
        for request_id, running in found:
            del self._running[request_id]
            ends = [Finished(request_id, FinishReason.ABORTED)]
            socket.send_multipart([running.peer, encode(TokenDeltas(self.steps, [], b"", finished=ends))])
        return len(found)

    def _stats(self) -> CoreStats:
        return CoreStats(self.steps, len(self._running), 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0)

    def _advance(self, socket: zmq.Socket[bytes]) -> None:
        for peer in {running.peer for running in self._running.values()}:
            if deltas := self._deltas(peer):
                socket.send_multipart([peer, encode(deltas)])

    def _deltas(self, peer: bytes) -> TokenDeltas | None:
        ids: list[int] = []
        rows: list[int] = []
        counts: list[int] = []
        first: list[FirstToken] = []
        finished: list[Finished] = []
        prompts: list[PromptLogprobs] = []
        proposed: list[int] = []
        with_logprobs: list[int] = []
        for request_id, running in list(self._running.items()):
            if running.peer != peer:
                continue
            script = running.script
            if running.sent >= script.dies_after >= 0:
                self.die("a request ended it")
            new = script.ids[running.sent : running.sent + script.per_step]
            if new:
                rows.append(request_id)
                counts.append(len(new))
                proposed.append(script.drafts)
                if running.request.sampling.logprobs >= 0:
                    with_logprobs += range(len(ids), len(ids) + len(new))
                ids += new
                if not running.sent:
                    first.append(FirstToken(request_id, script.cached))
                    prompts += _prompt_chunks(running.request)
                running.sent += len(new)
            if running.sent >= len(script.ids) and script.reason is not None:
                end = Finished(request_id, script.reason, script.stop_token_id, script.message, script.leased)
                finished.append(end)
                del self._running[request_id]
        if not rows and not finished:
            return None
        self.steps += 1
        if all(count == 1 for count in counts):
            counts = []
        logprobs = None
        if with_logprobs:
            logprobs = SampledLogprobs(with_logprobs, table([ids[i] for i in with_logprobs], 20))
        if not any(proposed):
            proposed = []
        return TokenDeltas(
            self.steps, rows, pack_ids(ids), counts, first, finished, logprobs, prompts, proposed
        )


def _sequence(message: AddRequest, request_id: int, index: int) -> AddRequest:
    """The request for one of the sequences of `message`."""
    replace = msgspec.structs.replace
    sampling = replace(message.sampling, sequence=message.sampling.sequence + index)
    return replace(message, request_ids=[request_id], sampling=sampling)


def _prompt_chunks(request: AddRequest) -> list[PromptLogprobs]:
    """Two chunks that overlap, as after a preemption."""
    top, ids = request.prompt_logprobs, unpack_ids(request.prompt_ids)
    if top < 0:
        return []
    middle = len(ids) // 2
    chunks = [(1, ids[1 : middle + 2]), (max(middle, 1), ids[max(middle, 1) :])]
    return [
        PromptLogprobs(request.request_ids[0], start, table(chunk, top)) for start, chunk in chunks if chunk
    ]
