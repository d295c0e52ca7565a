"""From the host to the device without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array's numbers on `device`; on a CPU they share its memory.

    The caller leaves the array as it is from then on.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # The pinned copy is kept from reuse by torch until the transfer is done.
    return host.pin_memory().to(device, non_blocking=True)
