"""How many programs a persistent kernel has."""

from functools import cache

import torch

_INTERPRETED_SMS = 4


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_for(tiles: int, device: torch.device) -> int:
    """One program on each SM, but no more than there are tiles."""
    return min(tiles, num_sms(device))
