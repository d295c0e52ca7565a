"""Two independent parts of a layer at the same time, on two streams of the GPU.

    main stream     … ─ fork ─ routed experts ─ join ─ …
    second stream          └── shared experts ──┘

Fork and join are events, so a graph captures them as two branches. Three rules keep this safe:

- A kernel of either branch waits for everything before the fork, and what follows the join for both
  branches. So memory that a branch frees is not written again before its last reader is done.
- Only one branch may have kernels whose programs wait for one another, such as stream-K GEMMs: two of
  them could each hold SMs that the other's programs need. They also share one workspace.
- Neither branch has collectives, whose programs wait for other GPUs.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class SecondStream:
    """The second stream of a GPU; one object serves all layers."""

    def __init__(self, device: torch.device, most_tokens: int):
        """Used for up to `most_tokens` tokens: the kernels of many tokens fill the GPU alone."""
        self._device = device
        self._most_tokens = most_tokens
        self._stream = torch.cuda.Stream(device)

    def run_both(
        self, tokens: int, first: Callable[[], Tensor], second: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(first(), second()), with `second` on the second stream unless there are too many tokens."""
        if not 0 < tokens <= self._most_tokens:
            return first(), second()
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            later = second()
        now = first()
        main.wait_stream(self._stream)
        return now, later
