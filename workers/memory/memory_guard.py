"""Handles device out-of-memory.

In a step the requests that need the memory fail, not the worker; at start the worker fails with a remedy.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from atom.shared.utils.logger import get_logger

T = TypeVar("T")

SMALLER_STEPS = "lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs with -tp"
SMALLER_CACHE = (
    "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or capture fewer --cudagraph-capture-sizes"
)


class MemoryGuard:
    """Runs parts of a step and catches torch.OutOfMemoryError.

    Only with a single rank: others would wait in a collective that this one never enters, or continue
    with tokens that this one does not have.
    """

    def __init__(self, device: torch.device, num_ranks: int):
        self._device = device
        self._num_ranks = num_ranks

    def attempt(self, part: str, compute: Callable[[], T]) -> T | None:
        """The result of `compute`; None if the device had too little memory for it.

        `part` names it in messages. With several ranks raises torch.OutOfMemoryError instead.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if self._num_ranks > 1:
                raise
            cause = str(error).partition("\n")[0]
        # Here the exception is freed, and with it the tensors that its frames reference.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        get_logger().error("%s has too little memory for %s in a step: %s", self._device, part, cause)
        return None


def reason_of(part: str) -> str:
    """The error message for the client of a failed request."""
    return f"the device has too little memory for {part} of this request: try again later"


@contextlib.contextmanager
def explain_out_of_memory(device: torch.device, purpose: str, remedy: str) -> Iterator[None]:
    """Raise MemoryError with a remedy in place of torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError:
        if device.type != "cuda":
            raise
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        raise MemoryError(
            f"{device} has too little memory for {purpose}: {free >> 20} of its {total >> 20} MiB are free, "
            f"{allocated >> 20} are allocated by this worker, {(total - free - allocated) >> 20} are used by "
            f"other processes, the driver and caches: {remedy}"
        ) from None
