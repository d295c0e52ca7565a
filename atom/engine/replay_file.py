"""`atom-launch --replay-file FILE`: runs the requests of a flight record again, and says what it saw.

The requests run together in a new engine of the recorded configuration, each from the tokens that it had,
for some tokens more. If the engine ends again, halves of them run in further engines, until one request is
left that ends an engine alone. Without ids in the record the prompts are made up, of the same lengths: what
depends on shapes shows, what depends on contents does not.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec
import zmq

from atom.engine.client_parts import ClientParts
from atom.engine.engine_host import EngineHost
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError
from atom.shared.messages.engine import (
    ID_BYTES,
    AddRequest,
    CoreDead,
    FinishReason,
    FromCore,
    TokenDeltas,
    pack_ids,
)
from atom.shared.messages.flight_record import FORMAT, MAX_RECORD_BYTES, FlightRecord, RecordedRequest
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.version import atom_version
from atom.supervisor import StartError, Supervisor
from atom.supervisor.progress import ProgressBars
from frontend.engine_client.core_links import CoreLinks

__all__ = ["Outcome", "read_record", "replay_file", "replayed_request"]

_MORE_TOKENS = 64
"""That each sequence generates, if its request allows."""
_WAIT_S = 0.2
_FIRST_MADE_UP_ID = 3
_ENDED_WELL = (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.MAX_TOKENS)


@dataclass
class Outcome:
    """What one run of requests gave."""

    death: str = ""
    """Why the engine has ended; empty if it has not."""
    tokens: int = 0
    finished: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that ended with an error of their own: names and reasons."""


def replay_file(path: str, config: EngineConfig, explicit: set[str], on_turn: Callable[[], None]) -> int:
    """Run the record at `path` again, and print what happens; the exit status is 1 if the engine ends again.

    `explicit` settings of `config` replace those of the record. `on_turn` is called several times a second
    while an engine starts and runs. Raises ConfigError for a file that is none, and StartError if the engine
    does not start.
    """
    record = read_record(Path(path))
    run = _Runs(record, _merged(record, config, explicit), explicit, on_turn)
    print(_summary(record), flush=True)
    if not record.requests:
        print("the record has no requests: nothing to run")
        return ExitStatus.DONE
    outcome = run.once(record.requests)
    print(_told(outcome, len(record.requests)), flush=True)
    if not outcome.death:
        return ExitStatus.DONE
    found = run.search(record.requests)
    if len(found) == 1:
        print(f"request {found[0].name!r}, sequence {found[0].sequence}, ends an engine alone")
    else:
        print(f"no half of these {len(found)} sequences ends an engine alone: {_names(found)}")
    return ExitStatus.FAILURE


def read_record(path: Path) -> FlightRecord:
    """Raises ConfigError, which names the file and what is wrong with it."""
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise ConfigError(f"--replay-file {path}: it has more than {MAX_RECORD_BYTES} bytes")
        record = msgspec.json.decode(path.read_bytes(), type=FlightRecord)
    except OSError as error:
        raise ConfigError(f"--replay-file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay-file {path}: this is no flight record: {error}") from None
    if record.format != FORMAT:
        raise ConfigError(f"--replay-file {path}: its format is {record.format}; this version reads {FORMAT}")
    return record


def replayed_request(
    record: FlightRecord, place: int, request: RecordedRequest, vocab_size: int
) -> AddRequest:
    """The request that goes on with sequence `place` of the record from the tokens that it had."""
    ids = request.prompt_ids + request.output_ids
    if not ids:
        made_up = max(vocab_size - _FIRST_MADE_UP_ID, 1)
        count = request.prompt_tokens + request.generated_tokens
        ids = pack_ids(_FIRST_MADE_UP_ID + (7 * at + place) % made_up for at in range(count))
    left = max(request.max_tokens - request.generated_tokens, 1)
    return AddRequest(
        [place],
        ids,
        request.generated_tokens + min(left, _MORE_TOKENS),
        request.sampling,
        priority=request.priority,
        prompt_length=request.prompt_tokens if request.generated_tokens else 0,
        name=request.name,
    )


def _merged(record: FlightRecord, config: EngineConfig, explicit: set[str]) -> EngineConfig:
    """The recorded configuration of one engine, with the settings that were given now."""
    merged = record.config
    for concern in fields(merged):
        recorded, given = getattr(merged, concern.name), getattr(config, concern.name)
        names = explicit.intersection(each.name for each in fields(given))
        changed = replace(recorded, **{name: getattr(given, name) for name in names})
        merged = replace(merged, **{concern.name: changed})
    if merged.parallel.nnodes > 1:
        raise ConfigError(
            "--replay-file: the record is of a server of several nodes, which cannot be run again"
        )
    if not merged.parallel.lockstep:
        merged = replace(merged, parallel=replace(merged.parallel, data_parallel_size=1))
    return replace(merged, observability=replace(merged.observability, flight_recorder="off"))


class _Runs:
    """Runs requests of a record, each time in a new engine."""

    def __init__(
        self, record: FlightRecord, config: EngineConfig, explicit: set[str], on_turn: Callable[[], None]
    ):
        self._record = record
        self._config = config
        self._explicit = explicit
        self._on_turn = on_turn
        setup_logging("replay", config.observability.log_level)

    def search(self, requests: Sequence[RecordedRequest]) -> Sequence[RecordedRequest]:
        """The smallest part of requests, which together end an engine, that halving finds."""
        while len(requests) > 1:
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                print(f"running {len(part)} of them: {_names(part)}", flush=True)
                outcome = self.once(part)
                print(_told(outcome, len(part)), flush=True)
                if outcome.death:
                    requests = part
                    break
            else:
                break
        return requests

    def once(self, requests: Sequence[RecordedRequest]) -> Outcome:
        """Run requests together. Raises StartError, ConfigError."""
        bars = ProgressBars()
        with (
            Supervisor(bars.update, self._on_turn) as supervisor,
            contextlib.closing(_Client(self._on_turn)) as client,
        ):
            host = EngineHost(self._config, self._explicit)
            host.prepare(supervisor.prepare)
            host.resolve()
            host.start(supervisor)
            supervisor.wait_ready()
            bars.close()
            messages = [
                replayed_request(self._record, place, request, host.checkpoint.vocab_size)
                for place, request in enumerate(requests, start=1)
            ]
            limits = self._config.reliability
            return client.run(supervisor, host, messages, limits.step_timeout + 2 * limits.hang_timeout)


class _Client:
    """Sends requests to the engines of a supervisor and reads what comes."""

    def __init__(self, on_turn: Callable[[], None]):
        self._context = zmq.Context()
        self._on_turn = on_turn

    def close(self) -> None:
        self._context.destroy(linger=0)

    def run(
        self, supervisor: Supervisor, host: EngineHost, messages: list[AddRequest], silence_s: float
    ) -> Outcome:
        """Until all requests or an engine have ended, or nothing has come for `silence_s`."""
        outcome = Outcome()
        parts = ClientParts.of(host)
        links = CoreLinks(self._context, supervisor.engines, parts.router)
        links.connect()
        names = {message.request_ids[0]: message.name for message in messages}
        for message in messages:
            links.add(message)
        last = time.monotonic()
        while names and not outcome.death:
            self._on_turn()
            received = links.receive(_WAIT_S)
            if received is not None:
                _count(received[1], names, outcome)
                last = time.monotonic()
            elif time.monotonic() > last + silence_s:
                outcome.death = f"nothing has come for {silence_s:.0f} s"
            else:
                outcome.death = _failure(supervisor)
        return outcome


def _count(message: FromCore, names: dict[int, str], outcome: Outcome) -> None:
    if isinstance(message, CoreDead):
        outcome.death = message.reason
    elif isinstance(message, TokenDeltas):
        outcome.tokens += len(message.token_ids) // ID_BYTES
        for end in message.finished:
            name = names.pop(end.request_id, "")
            outcome.finished += 1
            if end.reason not in _ENDED_WELL:
                outcome.failed[name] = end.message or end.reason.name.lower()


def _failure(supervisor: Supervisor) -> str:
    """Why an engine has ended; empty while none has."""
    try:
        supervisor.check(wait_s=0)
    except StartError as error:
        return str(error)
    return ""


def _summary(record: FlightRecord) -> str:
    steps = f"{len(record.steps)} steps" + (
        f", {record.steps[0].step} to {record.steps[-1].step}" if record.steps else ""
    )
    lines = [
        f"flight record of {record.written_at}, ATOM {record.atom}, {record.architecture}, "
        f"engine {record.engine}",
        f"  it {'hung' if record.is_hang else 'ended'}: {record.reason}",
        f"  {steps}, {record.num_in_flight} without a result; {record.num_requests} unfinished sequences",
        f"  suspected first: {', '.join(record.suspects) or 'none'}",
    ]
    if record.atom != atom_version():
        lines.append(f"  this is ATOM {atom_version()}: what is seen may differ")
    if not record.has_ids:
        lines.append(
            "  it has no token ids (--flight-recorder ids): prompts are made up, of the same lengths"
        )
    if without := sum(request.has_grammar for request in record.requests):
        lines.append(f"  {without} sequences had a grammar, which is left out")
    if (left_out := record.num_requests - len(record.requests)) > 0:
        lines.append(f"  {left_out} sequences are not in it")
    return "\n".join(lines)


def _told(outcome: Outcome, count: int) -> str:
    lines = [f"{outcome.finished} of {count} sequences ended, after {outcome.tokens} new tokens"]
    lines += [f"  {name!r} failed: {reason}" for name, reason in sorted(outcome.failed.items())]
    lines.append(f"the engine ended: {outcome.death}" if outcome.death else "the engine did not end")
    return "\n".join(lines)


def _names(requests: Sequence[RecordedRequest]) -> str:
    names = list(dict.fromkeys(request.name for request in requests))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
