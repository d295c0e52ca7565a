"""A trace on a disk that gets full ends, and the process that writes it goes on."""

import errno
import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from atom.shared.utils import step_trace
from atom.shared.utils.step_trace import StepTrace
from tools.step_report import read

_ROOM = 100


class FullDisk(io.FileIO):
    """A file on a disk that has so many bytes left."""

    def write(self, content: Any) -> int:
        taken = bytes(content)[: _ROOM - self.tell()]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(taken)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("atom"), "propagate", True)
    return caplog


def test_whole_lines_stay_and_no_more_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_trace, "FileIO", FullDisk)
    trace = StepTrace(str(tmp_path), "core")
    for step in range(9):
        trace.mark("sent", step)
    trace.close()
    steps = list(read(tmp_path / "core.jsonl", 0, 9))
    assert 0 < len(steps) < 9 and steps == list(range(len(steps)))
    (text,) = warnings.messages
    assert text.startswith("--step-trace: no further steps are recorded in ") and text.endswith("on device")


def test_a_full_disk_has_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step_trace, "FileIO", refuse)
    StepTrace(str(tmp_path), "core").mark("sent", 1)
    assert len(warnings.messages) == 1


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        StepTrace(str(tmp_path / "file" / "trace"), "core")
