"""Handles device out-of-memory in a step: the requests that need the memory fail, not the worker."""

from collections.abc import Callable
from typing import TypeVar

import torch

from atom.shared.utils.logger import get_logger

T = TypeVar("T")


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
