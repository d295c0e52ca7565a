"""Memory that kernels leave as they found it."""

import threading

import pytest
import torch

from atom_ops.triton_impl.hardware.device_state import kept

CPU = torch.device("cpu")


def test_each_owner_has_its_own_and_keeps_it() -> None:
    one = kept("one", CPU, 3, 7)
    assert one.tolist() == [7, 7, 7] and one.dtype == torch.int32
    assert kept("one", CPU, 3, 7) is one
    assert kept("another", CPU, 3, 7) is not one


def test_in_a_capture_another_thread_writes_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture records may never run."""
    threads: list[int] = []
    full = torch.full

    def counted(size: tuple[int], value: int, **_: object) -> torch.Tensor:
        threads.append(threading.get_ident())
        return full(size, value, dtype=torch.int32)

    monkeypatch.setattr(torch, "full", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kept("captured", torch.device("cuda", 0), 2).tolist() == [0, 0]
    assert threads and threads[0] != threading.get_ident()
    kept.cache_clear()
