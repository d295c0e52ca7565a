"""The slots of a MoE layer's experts on the device, where steps read them."""

from collections.abc import Sequence

import numpy as np
import torch

from atom_ops import ExpertSlots, to_device
from parallel.expert.placement import Placement, first_placement
from workers.layers.context import BuildContext


class SlotMap:
    """Which expert is in which slot, on the host and on the device. Changed between steps alone."""

    def __init__(self, num_experts: int, build: BuildContext):
        self._device = build.device
        self._dp_rank = build.dispatch.dp_rank
        redundant = build.redundant_experts or 0
        self.placement: Placement = first_placement(num_experts, redundant)
        sizes = (num_experts, 1 + redundant), (num_experts,), (num_experts,)
        tensors = [torch.zeros(size, dtype=torch.int32, device=build.device) for size in sizes]
        self.experts = ExpertSlots(*tensors)
        if self._device.type != "meta":
            self.move(self.placement)

    def move(self, placement: Sequence[int]) -> None:
        """Route to experts in these slots from the next step on; does not wait for the device.

        Data-parallel ranks begin with different replicas, because each of them numbers its tokens from 0.
        """
        self.placement = list(placement)
        slots: list[list[int]] = [[] for _ in self.experts.replicas_X]
        for slot, expert in enumerate(placement):
            slots[expert].append(slot)
        rows = np.zeros(tuple(self.experts.slots_XR.shape), np.int32)
        for expert, own in enumerate(slots):
            first = self._dp_rank % len(own)
            rows[expert, : len(own)] = own[first:] + own[:first]
        replicas = np.array([len(own) for own in slots], np.int32)
        self.experts.slots_XR.copy_(to_device(rows, self._device))
        self.experts.replicas_X.copy_(to_device(replicas, self._device))
