"""Which stream each part of a layer runs on, and in which order, with streams that record what is asked."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from workers.layers.moe.second_stream import SecondStream

GPU = torch.device("cuda", 0)


class Streams:
    """In place of torch.cuda: logs waits, and the stream that work is launched on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.Stream(GPU, "main", self.log)

    class Stream:
        def __init__(self, device: torch.device, name: str, log: list[str]):
            self.name, self.log = name, log

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.log.append(f"{self.name} waits for {other.name}")

    def current_stream(self, device: torch.device) -> "Streams.Stream":
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: "Streams.Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def work(self, name: str) -> torch.Tensor:
        self.log.append(f"{name} on {self.current.name}")
        return torch.zeros(())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Streams.Stream(device, "second", made.log))
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def test_up_to_the_threshold_the_parts_are_two_branches(streams: Streams) -> None:
    second = SecondStream(GPU, 8)
    for tokens in (1, 8):
        second.run_both(tokens, lambda: streams.work("routed"), lambda: streams.work("shared"))
        assert streams.log == [
            "second waits for main",
            "shared on second",
            "routed on main",
            "main waits for second",
        ]
        streams.log.clear()


@pytest.mark.parametrize("tokens", [0, 9])
def test_beyond_it_one_follows_the_other(streams: Streams, tokens: int) -> None:
    SecondStream(GPU, 8).run_both(tokens, lambda: streams.work("routed"), lambda: streams.work("shared"))
    assert streams.log == ["routed on main", "shared on main"]
