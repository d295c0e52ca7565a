"""The last steps and the unfinished requests of an engine, written to a file when it dies or hangs.

While the engine runs this is one append of a reference for each step: `sent` is that of a bounded deque. It
keeps the frames that went to the workers, since as many batches, each of many small objects, would not be in
the CPU's caches any more when they are freed.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable
from datetime import datetime

import msgspec

from atom.shared.messages.codec import Decoder
from atom.shared.messages.flight_record import (
    FORMAT,
    FlightRecord,
    RecordedRequest,
    RecordedRow,
    RecordedStep,
)
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.worker import ScheduledBatch
from atom.shared.utils.kept_files import new_kept_file
from atom.shared.utils.logger import get_logger
from atom.shared.utils.version import atom_version
from engine_core.core import EngineCore
from engine_core.requests.request import NO_ROW, Request

__all__ = ["FlightRecorder"]

_MOST_STEPS = 64
_MOST_REQUESTS = 256
_MOST_SUSPECTS = 16
_MOST_ID_BYTES = 16 * 1024 * 1024
"""Limit for all requests together; those after it are without ids."""


class FlightRecorder:
    """`sent(frame)` for each step, `write` at the end."""

    def __init__(self, launch: CoreLaunch):
        self._launch = launch
        self._mode = launch.config.observability.flight_recorder
        self._steps: deque[bytes] = deque(maxlen=_MOST_STEPS)
        self._decoder: Decoder[ScheduledBatch] = Decoder(ScheduledBatch)
        self.sent: Callable[[bytes], None] = self._steps.append
        """The frame of a `ScheduledBatch` was sent to the workers."""

    @property
    def last(self) -> ScheduledBatch | None:
        """The step that was sent last."""
        return self._decoder.decode(self._steps[-1]) if self._steps else None

    def write(self, core: EngineCore, reason: str, is_hang: bool) -> None:
        """Write the file, and log its path; nothing if no step was sent, or if it is off."""
        if self._mode == "off" or not self._steps:
            return
        try:
            path = new_kept_file("flights", f"engine-{self._launch.data_parallel_rank}", ".json")
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.record(core, reason, is_hang))))
        except (OSError, ValueError) as error:
            get_logger().error("the flight record cannot be written: %s", error)
            return
        get_logger().error(
            "the last steps and the requests are in %s: atom-launch --replay-file %s runs them again",
            path,
            path,
        )

    def record(self, core: EngineCore, reason: str, is_hang: bool) -> FlightRecord:
        """What `write` writes."""
        launch = self._launch
        steps = [self._decoder.decode(frame) for frame in self._steps]
        in_flight = steps[max(len(steps) - core.num_in_flight, 0) :]
        rows = {row for batch in in_flight for row in batch.rows}
        unfinished = list(core.unfinished())
        unfinished.sort(key=lambda request: (request.row not in rows, request.row == NO_ROW))
        has_ids = self._mode == "ids"
        return FlightRecord(
            FORMAT,
            atom_version(),
            datetime.now().astimezone().isoformat(timespec="seconds"),
            reason,
            is_hang,
            launch.data_parallel_rank,
            launch.checkpoint.architecture,
            has_ids,
            _suspects(unfinished, rows, in_flight),
            len(in_flight),
            len(unfinished),
            list(_requests(unfinished[:_MOST_REQUESTS], rows, has_ids)),
            [_step(batch) for batch in steps],
            launch.config,
        )


def _step(batch: ScheduledBatch) -> RecordedStep:
    new_rows = [
        RecordedRow(
            each.row, each.num_known, each.computed, each.prompt_length, list(map(len, each.block_ids))
        )
        for each in batch.new_rows
    ]
    return RecordedStep(batch.step, batch.rows, batch.counts, batch.num_drafts, new_rows)


def _requests(requests: Iterable[Request], rows: Collection[int], has_ids: bool) -> Iterable[RecordedRequest]:
    left = _MOST_ID_BYTES if has_ids else 0
    for request in requests:
        ids = request.token_ids.packed(0, request.num_tokens) if has_ids else b""
        left -= len(ids)
        prompt_bytes = request.prompt_length * 4
        known = left >= 0 and has_ids
        sampling = request.sampling
        yield RecordedRequest(
            name=request.settings.name,
            sequence=sampling.sequence,
            status=request.state.name.lower(),
            row=request.row,
            in_flight=request.row in rows,
            prompt_tokens=request.prompt_length,
            generated_tokens=request.num_generated,
            max_tokens=request.max_length - request.prompt_length,
            priority=request.priority,
            preemptions=request.preemptions,
            replays=request.settings.replays,
            has_grammar=request.settings.grammar is not None,
            sampling=sampling if known else msgspec.structs.replace(sampling, logits_processors=None),
            prompt_ids=ids[:prompt_bytes] if known else b"",
            output_ids=ids[prompt_bytes:] if known else b"",
        )


def _suspects(
    requests: Iterable[Request], rows: Collection[int], in_flight: Iterable[ScheduledBatch]
) -> list[str]:
    """Requests of the steps in flight: first those that were replayed, then those that are new in a step."""
    new = {each.row for batch in in_flight for each in batch.new_rows}
    running = [request for request in requests if request.row in rows]
    running.sort(key=lambda request: (-request.settings.replays, request.row not in new))
    names = dict.fromkeys(request.settings.name for request in running)
    return list(itertools.islice(names, _MOST_SUSPECTS))
