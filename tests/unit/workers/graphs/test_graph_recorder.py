"""Which functions run before their capture; captures themselves need a GPU."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from atom_ops.triton_impl.hardware import parallel_compile
from workers.graphs import graph_recorder
from workers.graphs.graph_recorder import GraphRecorder


class Step:
    """A step whose kernels are loaded by its first run; `calls` tells where it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs_always: bool) -> None:
        self.calls: list[str] = []
        self.loaded: set[str] = set()
        self.captures = False
        monkeypatch.setattr(graph_recorder.torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(graph_recorder.torch.cuda, "Stream", lambda: None)
        self.record = GraphRecorder(runs_always)
        monkeypatch.setattr(self.record, "_capture", self._capture)

    def _capture(self, body: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.captures = True
        try:
            return lambda: None, body()
        finally:
            self.captures = False

    def of(self, kernel: str) -> str:
        """Record a step that launches the kernel; returns its result."""

        def body() -> str:
            hook: Any = parallel_compile.knobs.runtime.jit_cache_hook
            if hook is not None and kernel not in self.loaded:
                hook(fn=type("Info", (), {"name": kernel}), key="", compile={})
            self.loaded.add(kernel)
            self.calls.append(f"{'capture' if self.captures else 'run'} {kernel}")
            return kernel

        found: str = self.record(body, "step")[1]
        return found


def test_a_step_of_loaded_kernels_is_captured_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Step(monkeypatch, runs_always=False)
    assert [steps.of(kernel) for kernel in ("a", "a", "b", "b")] == ["a", "a", "b", "b"]
    assert steps.calls == ["run a", "capture a", "capture a", "run b", "capture b", "capture b"]
    assert parallel_compile.knobs.runtime.jit_cache_hook is None


def test_ranks_that_wait_for_one_another_run_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Step(monkeypatch, runs_always=True)
    steps.of("a")
    steps.of("a")
    assert steps.calls == ["run a", "capture a"] * 2


def test_what_only_a_run_can_initialise(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Step(monkeypatch, runs_always=False)
    steps.of("a")
    ran: list[bool] = []

    def body() -> None:
        ran.append(steps.captures)
        if ran == [True]:
            raise RuntimeError("a library cannot be initialised in a capture")

    steps.record(body, "step")
    assert ran == [True, False, True]


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Step(monkeypatch, runs_always=False)
    steps.of("a")

    def fail() -> None:
        raise RuntimeError("no such layout")

    with pytest.raises(RuntimeError, match="no such layout"):
        steps.record(fail, "step")


class Allocator:
    """A pool that graphs share; a capture that an error has made invalid does not end its recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_recording = False
        self.is_valid = True
        cuda = graph_recorder.torch.cuda
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(cuda, "Stream", lambda: None)
        monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(graph_recorder.torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        if self.is_recording:
            raise RuntimeError("already recording to mempool_id")
        self.is_recording = self.is_valid = True

    def capture_end(self) -> None:
        if not self.is_valid:
            raise RuntimeError("the capture was invalidated")
        self.is_recording = False

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.is_recording:
            raise RuntimeError("not recording to mempool_id")
        self.is_recording = False

    def replay(self) -> None: ...


@pytest.mark.parametrize("invalidates", [False, True])
def test_a_capture_that_fails_leaves_the_pool_to_the_next(
    monkeypatch: pytest.MonkeyPatch, invalidates: bool
) -> None:
    allocator = Allocator(monkeypatch)
    record = GraphRecorder(runs_always=False)
    record(lambda: None, "first")
    calls: list[bool] = []

    def body() -> str:
        calls.append(allocator.is_recording)
        if calls == [True]:
            allocator.is_valid = not invalidates
            raise RuntimeError("a library cannot be initialised in a capture")
        return "result"

    assert record(body, "step")[1] == "result"
    assert calls == [True, False, True] and not allocator.is_recording
