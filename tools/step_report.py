"""Step overlap and idle share of the workers, from the directory of `--step-trace`.

python tools/step_report.py DIRECTORY [--first STEP] [--last STEP]
"""

import argparse
import json
from pathlib import Path

Events = dict[int, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first", type=int, default=0, help="first step to count")
    parser.add_argument("--last", type=int, default=1 << 62, help="last step to count")
    args = parser.parse_args()
    core = read(args.directory / "core.jsonl", args.first, args.last)
    ahead = sum(sent_before_result(core, step) for step in core)
    print(f"steps: {len(core)}; sent before the previous result arrived: {ahead}")
    for path in sorted(args.directory.glob("worker-*.jsonl")):
        print(f"{path.stem}: {idle_line(read(path, args.first, args.last))}")


def read(path: Path, first: int, last: int) -> Events:
    """The events' times of every step from `first` to `last`."""
    events: Events = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if first <= row["step"] <= last:
            events.setdefault(row["step"], {})[row["event"]] = row["t"]
    return events


def sent_before_result(core: Events, step: int) -> bool:
    """Whether the core sent `step` before it received the previous step's result."""
    before = core.get(step - 1, {})
    return "result" in before and core[step].get("sent", float("inf")) < before["result"]


def idle_line(worker: Events) -> str:
    """Busy and idle time between the first start and the last end."""
    spans = [(step["start"], step["end"]) for step in worker.values() if {"start", "end"} <= step.keys()]
    if not spans:
        return "no complete step"
    busy = sum(end - start for start, end in spans)
    total = max(end for _, end in spans) - min(start for start, _ in spans)
    return f"{len(spans)} steps, {busy / len(spans) * 1e3:.2f} ms each, idle {1 - busy / total:.1%}"


if __name__ == "__main__":
    main()
