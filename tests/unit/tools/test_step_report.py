"""The report on a trace whose answer is known."""

from pathlib import Path

from atom.shared.utils.step_trace import StepTrace
from tools.step_report import idle_line, read, sent_before_result


def write(path: Path, *events: tuple[int, str, float]) -> Path:
    path.write_text("".join(f'{{"step": {s}, "event": "{e}", "t": {t}}}\n' for s, e, t in events))
    return path


def test_overlap_is_sending_before_the_result(tmp_path: Path) -> None:
    path = write(
        tmp_path / "core.jsonl",
        *[(1, "sent", 0.0), (2, "sent", 1.0), (1, "result", 2.0), (2, "result", 3.0), (3, "sent", 4.0)],
    )
    core = read(path, 0, 9)
    assert [sent_before_result(core, step) for step in (1, 2, 3)] == [False, True, False]
    assert list(read(path, 2, 2)) == [2]


def test_idle_is_the_time_between_steps(tmp_path: Path) -> None:
    path = write(
        tmp_path / "worker-0.jsonl", (1, "start", 0.0), (1, "end", 3.0), (2, "start", 4.0), (2, "end", 5.0)
    )
    assert idle_line(read(path, 0, 9)) == "2 steps, 2000.00 ms each, idle 20.0%"


def test_a_process_writes_what_the_report_reads(tmp_path: Path) -> None:
    trace = StepTrace(str(tmp_path / "new"), "core")
    trace.mark("sent", 5)
    trace.close()
    assert list(read(tmp_path / "new" / "core.jsonl", 0, 9)[5]) == ["sent"]
    StepTrace(None, "core").mark("sent", 1)
