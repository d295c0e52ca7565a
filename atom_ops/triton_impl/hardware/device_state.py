"""Memory that kernels leave as they found it, so that their next launch finds it so again."""

import threading
from functools import cache

import torch
from torch import Tensor


@cache
def kept(owner: str, device: torch.device, count: int, value: int = 0) -> Tensor:
    """`count` int32 values of `owner`'s kernels, which are `value` between launches; these use one stream."""

    def make() -> None:
        made.append(torch.full((count,), value, dtype=torch.int32, device=device))

    made: list[Tensor] = []
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A capture that is not replayed would never write the value; another thread's stream is not captured.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        make()
    return made[0]
