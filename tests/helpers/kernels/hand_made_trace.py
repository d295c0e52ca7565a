"""Traces written by hand: what a GPU's would hold, with durations that a test knows."""

import gzip
import json
from pathlib import Path
from typing import Any

HOST, DEVICE = 1, 0


class HandMadeTrace:
    """Ranges nest as the calls that make them; kernels run one after another, or where they are placed."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._host_us = 4_414_917_175_871.089  # as large as real ones: seconds since the machine began
        self._device_us = self._begin_us = self._host_us + 0.5
        self._correlation = 0

    def range(self, name: str, *content: Any, cat: str = "user_annotation", tid: int = HOST) -> None:
        """`content` are functions that make what lies within."""
        start = self._host_us
        self._host_us += 0.001
        for make in content:
            make()
        self._host_us += 0.001
        self._add(cat, name, start, self._host_us - start, tid)

    def operator(self, name: str, duration_us: float, *content: Any) -> None:
        """On the host; `content` takes part of its time."""
        start = self._host_us
        for make in content:
            make()
        self._host_us = start + duration_us
        self._add("cpu_op", name, start, duration_us)

    def launch(self, *kernels: tuple[str, float], call: str = "cudaLaunchKernel") -> None:
        """A call of the host, and the kernels (name, duration) that it starts: none while capturing."""
        args = self._call(call)
        for name, duration_us in kernels:
            cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            self._add(cat, name, self._device_us, duration_us, 7, DEVICE, args)
            self._device_us += duration_us

    def place(self, *kernels: tuple[str, float, float], stream: int = 7) -> None:
        """A call of the host, and kernels (name, begin, end) of its: microseconds from the trace's begin."""
        args = self._call("cudaGraphLaunch")
        for name, begin_us, end_us in kernels:
            self._add("kernel", name, self._begin_us + begin_us, end_us - begin_us, stream, DEVICE, args)

    def write(self, path: Path) -> Path:
        """Compressed, as the workers do; the events in no order."""
        meta = {"ph": "M", "name": "process_name", "pid": DEVICE, "ts": 0, "args": {"name": "python"}}
        text = json.dumps({"schemaVersion": 1, "traceEvents": [meta, *reversed(self._events)]})
        path.write_bytes(gzip.compress(text.encode()))
        return path

    def _call(self, name: str) -> dict[str, int]:
        """A call of the host; what its kernels share with it."""
        self._correlation += 1
        args = {"correlation": self._correlation}
        self._add("cuda_runtime", name, self._host_us, 0.75, args=args)
        self._host_us += 1
        return args

    def _add(
        self,
        cat: str,
        name: str,
        start: float,
        duration: float,
        tid: int = HOST,
        pid: int = 42,
        args: dict[str, int] | None = None,
    ) -> None:
        moment = {"ts": round(start, 3), "dur": round(duration, 3), "pid": pid, "tid": tid}
        self._events.append({"ph": "X", "cat": cat, "name": name, "args": args or {}, **moment})
