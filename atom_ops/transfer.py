"""Copies from the host to the device that do not synchronise."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a CPU it shares the array's memory.

    The caller must not change the array afterwards.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # torch does not reuse the pinned copy before the transfer is done.
    return host.pin_memory().to(device, non_blocking=True)
