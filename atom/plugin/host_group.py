"""A host's tensor-parallel group as ATOM's communicator."""

from typing import Any

import torch

from parallel.communicator import Communicator


class HostCommunicator(Communicator):
    """The group of vLLM or SGLang, whose all-reduces go through the host's own kernels."""

    def __init__(self, group: Any):
        super().__init__(group.rank_in_group, group.world_size, group.device_group)
        self._host = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self._host.all_reduce(x) if self.size > 1 else x
        return summed
