"""Records torch profiler traces of one rank, in Chrome's trace format.

    DIRECTORY/rank_R/MODEL_ts_YYYYmmdd_HHMMSS_mmm.pt.trace.json.gz                 between start and stop
    DIRECTORY/rank_R/capture_graph_MODEL_ts_YYYYmmdd_HHMMSS_mmm.pt.trace.json.gz   graphs being captured

Ending a recording holds the GIL. The file is written and compressed in a thread while steps go on.
"""

import contextlib
import gzip
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from atom.shared.messages.profile import RankTrace
from atom.shared.utils import envs
from atom.shared.utils.errors import one_line
from atom_ops.native_impl import calls

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_COMPRESSION = 3  # a third of the time of level 6, for files a tenth larger
_CHUNK_BYTES = 1 << 20
_CLOSE_DEADLINE_S = 8.0


@dataclass(frozen=True, slots=True)
class _Recording:
    profile: profile
    started: float
    name: str
    names: contextlib.ExitStack
    """Within it, native kernels have names."""


class TraceRecorder:
    """Traces of one rank: `switch` recording on and off, `next_result` returns the results."""

    def __init__(self, directory: str, model: str, rank: int, device: torch.device):
        """`model` is a path or hub name; its last part is used in file names."""
        self._directory = Path(directory, f"rank_{rank}").absolute()
        self._model = _UNSAFE.sub("_", Path(model).name)
        self._rank = rank
        self._device = device
        self._recording: _Recording | None = None
        self._steps = 0
        self._writer: threading.Thread | None = None
        self._results: deque[RankTrace] = deque()

    @property
    def recording(self) -> bool:
        """Whether steps are being recorded."""
        return self._recording is not None

    @property
    def writing(self) -> bool:
        """Whether a file is being written, whose result follows."""
        return self._writer is not None and self._writer.is_alive()

    def prepare(self) -> None:
        """Make an empty recording: the first one takes seconds on a GPU."""
        with self._profile(plain=True):
            pass

    def switch(self, on: bool) -> None:
        """Start or stop recording; adds a result, also of a failure."""
        try:
            if on:
                self._start()
            else:
                self._stop()
        except (OSError, RuntimeError) as error:
            self._add_result(on, error=one_line(error, OSError, RuntimeError))

    def next_result(self) -> RankTrace | None:
        """The next result; None if there is none yet."""
        return self._results.popleft() if self._results else None

    @contextlib.contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Name the enclosed step; only while recording."""
        self._steps += 1
        with record_function(label):
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record the enclosed graph captures in a separate file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._profile(plain=True) as recorded:
            yield
        _write(recorded, self._directory / self._file_name("capture_graph_"))

    def close(self) -> None:
        """Stop recording and write the file; waits 8 s at most."""
        if self._recording is not None:
            self.switch(False)
        if self._writer is not None:
            self._writer.join(_CLOSE_DEADLINE_S)

    def _start(self) -> None:
        if self._recording is not None:
            raise RuntimeError("a recording runs already")
        self._directory.mkdir(parents=True, exist_ok=True)
        recorded = self._profile()
        recorded.__enter__()
        names = contextlib.ExitStack()
        names.enter_context(calls.keeping(calls.named))
        self._recording = _Recording(recorded, time.monotonic(), self._file_name(), names)
        self._steps = 0
        self._add_result(True)

    def _stop(self) -> None:
        """Must run in the thread that called `_start`."""
        recording = self._recording
        self._recording = None
        if recording is None:
            self._add_result(False)
            return
        elapsed_s = time.monotonic() - recording.started
        recording.names.close()
        recording.profile.__exit__(None, None, None)
        work = (recording.profile, recording.name, self._steps, elapsed_s)
        self._writer = threading.Thread(target=self._finish, args=work, name="trace-writer")
        self._writer.start()

    def _finish(self, recorded: profile, name: str, steps: int, elapsed_s: float) -> None:
        try:
            _write(recorded, self._directory / name)
        except (OSError, RuntimeError) as error:
            self._add_result(False, error=one_line(error, OSError, RuntimeError))
        else:
            self._add_result(False, name, steps, elapsed_s)

    def _add_result(
        self, on: bool, file: str = "", steps: int = 0, elapsed_s: float = 0.0, error: str = ""
    ) -> None:
        self._results.append(RankTrace(self._rank, on, str(self._directory), file, steps, elapsed_s, error))

    def _profile(self, plain: bool = False) -> profile:
        """torch.autograd's profiler: torch.profiler imports torch's compiler, which takes seconds."""
        more = envs.ATOM_PROFILER_MORE and not plain
        on_gpu = self._device.type != "cpu"
        return profile(
            use_kineto=True,
            use_device="cuda" if on_gpu else None,
            record_shapes=more,
            with_stack=more,
            profile_memory=more,
        )

    def _file_name(self, prefix: str = "") -> str:
        now = datetime.now()
        moment = f"{now:%Y%m%d_%H%M%S}_{now.microsecond // 1000:03d}"
        return f"{prefix}{self._model}_ts_{moment}.pt.trace.json.gz"


def _write(recorded: profile, path: Path) -> None:
    """Write the complete file or none. Raises OSError, RuntimeError."""
    plain = path.with_suffix(".part")
    packed = path.with_suffix(".gz.part")
    try:
        recorded.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", _COMPRESSION) as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
