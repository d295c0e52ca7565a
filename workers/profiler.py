"""Records what this rank and its device compute, and writes it as a trace that Chrome shows.

    DIRECTORY/rank_R/MODEL_ts_YYYYmmdd_HHMMSS_mmm.pt.trace.json.gz                 between start and stop
    DIRECTORY/rank_R/capture_graph_MODEL_ts_YYYYmmdd_HHMMSS_mmm.pt.trace.json.gz   graphs being captured

Only torch itself can end a recording and turn it into text, and nobody's Python runs meanwhile.
Compressing, which takes the longest, is left to a thread: steps go on.
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

from atom.messages.profile import RankTrace
from atom.utils import envs
from atom.utils.errors import one_line

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
_COMPRESSION = 3  # a third of the time of 6, for files a tenth larger
_PIECE = 1 << 20
_CLOSE_DEADLINE_S = 8.0


@dataclass(frozen=True, slots=True)
class _Recording:
    profile: profile
    started: float
    name: str


class TraceRecorder:
    """Of one rank. `switch` it, and `take` the answers once they are there."""

    def __init__(self, directory: str, model: str, rank: int, device: torch.device):
        """`model` is the path or name of the model: its last part goes into the names of the files."""
        self._directory = Path(directory, f"rank_{rank}").absolute()
        self._model = _UNFIT.sub("_", Path(model).name)
        self._rank = rank
        self._device = device
        self._recording: _Recording | None = None
        self._steps = 0
        self._writer: threading.Thread | None = None
        self._answers: deque[RankTrace] = deque()

    @property
    def recording(self) -> bool:
        """Whether steps are recorded now."""
        return self._recording is not None

    @property
    def writing(self) -> bool:
        """Whether an answer will come that is not there yet."""
        return self._writer is not None and self._writer.is_alive()

    def prepare(self) -> None:
        """Record nothing, once: what libraries set up for the first time takes seconds on a GPU."""
        with self._profile(plain=True):
            pass

    def switch(self, on: bool) -> None:
        """Start or stop, as told; the answer says what became of it, a failure too."""
        try:
            if on:
                self._start()
            else:
                self._stop()
        except (OSError, RuntimeError) as error:
            self._answer(on, error=one_line(error, OSError, RuntimeError))

    def take(self) -> RankTrace | None:
        """The next answer."""
        return self._answers.popleft() if self._answers else None

    @contextlib.contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Name what is computed within; while recording."""
        self._steps += 1
        with record_function(label):
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record the graphs that are captured within, in a file of their own."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._profile(plain=True) as recorded:
            yield
        _write(recorded, self._directory / self._file_name("capture_graph_"))

    def close(self) -> None:
        """Write what is still being recorded; waits some seconds at most."""
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
        self._recording = _Recording(recorded, time.monotonic(), self._file_name())
        self._steps = 0
        self._answer(True)

    def _stop(self) -> None:
        """In the thread that started: the profiler belongs to it."""
        ended, self._recording = self._recording, None
        if ended is None:
            self._answer(False)
            return
        elapsed_s = time.monotonic() - ended.started
        ended.profile.__exit__(None, None, None)
        work = (ended.profile, ended.name, self._steps, elapsed_s)
        self._writer = threading.Thread(target=self._finish, args=work, name="trace-writer")
        self._writer.start()

    def _finish(self, recorded: profile, name: str, steps: int, elapsed_s: float) -> None:
        try:
            _write(recorded, self._directory / name)
        except (OSError, RuntimeError) as error:
            self._answer(False, error=one_line(error, OSError, RuntimeError))
        else:
            self._answer(False, name, steps, elapsed_s)

    def _answer(
        self, on: bool, file: str = "", steps: int = 0, elapsed_s: float = 0.0, error: str = ""
    ) -> None:
        answer = RankTrace(self._rank, on, str(self._directory), file, steps, elapsed_s, error)
        self._answers.append(answer)

    def _profile(self, plain: bool = False) -> profile:
        """torch.profiler's own class imports torch's compiler when it starts, which takes seconds."""
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
    """Either the whole file or none. Raises OSError, RuntimeError."""
    plain, packed = path.with_suffix(".part"), path.with_suffix(".gz.part")
    try:
        recorded.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", _COMPRESSION) as target:
            shutil.copyfileobj(source, target, _PIECE)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
