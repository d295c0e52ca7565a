"""The steps of a trace, and the kernels of each step with their modules.

    host     prefill[…] > MODULE > … > launch ──correlation──▶ kernel       an eager step
    host     decode[…] > replay_graph_NAME > launch ──▶ kernel kernel …     a graph replay
    capture  capture_graph_NAME > MODULE > … > launch                       … with its modules

A graph's kernels run in the order of its captured launches. On a CPU the trace has no kernels and the
outermost operators are used instead. A kernel's time begins at the end of the previous kernels of its
stream, because with PDL it starts early and waits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.traces.events import Event, TraceError, nested, read_events
from tools.traces.stream_time import times_without_waiting

_STEP = re.compile(r"(\w+)\[.*\]")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_MOMENT = re.compile(r"_ts_(\d{8}_\d{6}_\d{3})")
_LAUNCH = re.compile(r"launch.*kernel|memcpy|memset", re.IGNORECASE)
_HOST_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_REPLAY = "replay_graph_"
_CAPTURE = "capture_graph_"
Captures = dict[str, list[str]]
"""The module of each launch, in order, for each captured graph."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or operator; `module` is the path of the innermost module of its launch, or empty."""

    name: str
    module: str
    start_ns: int
    duration_ns: int
    """Without its wait for previous kernels of its stream."""


@dataclass(slots=True)
class Step:
    """One step, named as `prefill[bs=1 tok=7 ctx=[7]]`."""

    kind: str
    label: str
    start_ns: int
    duration_ns: int
    """Time on the host."""
    kernels: list[Kernel] = field(default_factory=list)
    """Sorted by start."""

    @property
    def kernel_ns(self) -> int:
        """Total time of the kernels."""
        return sum(kernel.duration_ns for kernel in self.kernels)


def read_steps(path: Path, capture: Path | None = None) -> list[Step]:
    """The steps of a trace, by time. `capture` defaults to the newest capture trace in its folder.

    Raises TraceError and OSError.
    """
    events = read_events(path)
    source = capture or newest_capture(path)
    steps = steps_of(events, captures_of(read_events(source)) if source else {})
    if not steps:
        raise TraceError(f"{path} has no steps: record while the engine generates")
    return steps


def newest_capture(path: Path) -> Path | None:
    """The last capture trace in the folder of `path` that was started before it."""
    begun = _moment(path)
    found = [(_moment(other), other) for other in path.parent.glob(f"{_CAPTURE}*.json.gz") if other != path]
    return max((one for one in found if not begun or one[0] <= begun), default=("", None))[1]


def _moment(path: Path) -> str:
    """The start time in a trace's name; empty if the name has none."""
    found = _MOMENT.search(path.name)
    return found[1] if found else ""


def steps_of(events: Sequence[Event], captures: Captures) -> list[Step]:
    """The steps of these events. Raises TraceError if a replay does not match its capture."""
    device = _kernels_by_correlation(events)
    on_host = not device
    steps: dict[int, Step] = {}
    for event, around in nested(event for event in events if event.cat not in _DEVICE):
        outer = next((one for one in around if _is_step(one)), None)
        if outer is None:
            if _is_step(event):
                steps[id(event)] = _new_step(event)
            continue
        step = steps[id(outer)]
        if event.cat in _HOST_CALLS and event.correlation:
            step.kernels += _launched(device.pop(event.correlation, []), around, captures)
        elif event.cat == "cpu_op" and on_host and not any(one.cat == "cpu_op" for one in around):
            step.kernels.append(_as_kernel(event, event.duration_ns, _module(around)))
    for step in steps.values():
        step.kernels.sort(key=lambda kernel: kernel.start_ns)
    return sorted(steps.values(), key=lambda step: step.start_ns)


def captures_of(events: Iterable[Event]) -> Captures:
    """The last capture of each graph; earlier ones of the same name are warm-ups."""
    found: dict[str, tuple[int, list[str]]] = {}
    for event, around in nested(events):
        if event.cat == "user_annotation" and event.name.startswith(_CAPTURE):
            name = event.name.removeprefix(_CAPTURE)
            if name not in found or found[name][0] < event.start_ns:
                found[name] = (event.start_ns, [])
        elif _is_launch(event) and not any(_is_launch(one) for one in around):
            graph = next((one for one in around if one.name.startswith(_CAPTURE)), None)
            if graph is not None and found[name_of(graph)][0] == graph.start_ns:
                found[name_of(graph)][1].append(_module(around))
    return {name: modules for name, (_, modules) in found.items()}


def name_of(capture: Event) -> str:
    """The name of a captured graph."""
    return capture.name.removeprefix(_CAPTURE)


def _kernels_by_correlation(events: Iterable[Event]) -> dict[int, list[Kernel]]:
    """The devices' kernels, without modules; `events` as sorted by `read_events`."""
    on_device = [event for event in events if event.cat in _DEVICE]
    # For a device's events pid is the device and tid the stream.
    times = times_without_waiting(
        ((event.pid, event.tid), event.start_ns, event.end_ns) for event in on_device
    )
    found: dict[int, list[Kernel]] = defaultdict(list)
    for event, time in zip(on_device, times, strict=True):
        found[event.correlation].append(_as_kernel(event, time))
    return found


def _launched(kernels: list[Kernel], around: list[Event], captures: Captures) -> list[Kernel]:
    """The kernels of one launch: one kernel, or all kernels of a graph."""
    replay = next((one for one in around if one.name.startswith(_REPLAY)), None)
    if replay is None or len(kernels) < 2:
        return [replace(kernel, module=_module(around)) for kernel in kernels]
    graph = replay.name.removeprefix(_REPLAY)
    modules = captures.get(graph)
    if modules is None:
        raise TraceError(f"no capture trace has the modules of graph {graph}: record with --mark-trace")
    if len(modules) != len(kernels):
        raise TraceError(
            f"graph {graph} was captured with {len(modules)} launches and ran {len(kernels)} kernels: "
            "the capture trace is of another run"
        )
    kernels.sort(key=lambda kernel: kernel.start_ns)
    return [replace(kernel, module=module) for kernel, module in zip(kernels, modules, strict=True)]


def _is_step(event: Event) -> bool:
    return event.cat == "user_annotation" and _STEP.fullmatch(event.name) is not None


def _is_launch(event: Event) -> bool:
    return event.cat in _HOST_CALLS and _LAUNCH.search(event.name) is not None


def _new_step(event: Event) -> Step:
    return Step(event.name.partition("[")[0], event.name, event.start_ns, event.duration_ns)


def _as_kernel(event: Event, time_ns: int, module: str = "") -> Kernel:
    return Kernel(event.name.replace("aiter::", ""), module, event.start_ns, time_ns)


def _module(around: list[Event]) -> str:
    for event in reversed(around):
        if event.name.startswith((_REPLAY, _CAPTURE)):
            break
        if event.cat == "user_annotation" and _MODULE.fullmatch(event.name):
            return event.name
    return ""
