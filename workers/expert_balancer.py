"""Moves experts between ranks while steps go on, so that each rank gets about as many tokens as the others.

    steps          0 ─────────── interval - window ───────────── interval ── settled ─────────────────▶
    on the device  load counted    set to 0          counted       summed      moves, some in each step
    on the host                                                    copied      placements computed

Between two steps a few experts travel to other ranks and are written into their slots; the device does that
between the kernels of the two steps, so that no step waits for more. Until an expert is in a new slot
its old one serves it, so that every step computes the same function.

All ranks of the ep group launch the same steps (one engine's tensor-parallel ranks, or data-parallel ranks in
lockstep), count them, see the same summed load, and therefore move the same experts in the same step without
a message.

Kernels with programmatic dependent launch may read weights before the kernel in front of them has ended. A
step begins with kernels that read no expert, and they wait for the copies.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atom.shared.config.eplb import SETTLING_STEPS, EPLBConfig
from parallel.communicator import Communicator
from parallel.expert.placement import Copies, balanced, copies, imbalance, slots_of_ranks
from workers.layers.moe.expert_slots import SlotMap
from workers.layers.moe.moe import Experts, MoE

_BYTES_PER_STEP = 64 << 20
"""That a rank sends, and receives, between two steps; but 2 experts at least."""


class _Layer(NamedTuple):
    slots: SlotMap
    experts: Experts


class ExpertBalancer:
    """Call `before_step` before every step, on every rank."""

    def __init__(self, model: nn.Module, ep: Communicator, config: EPLBConfig):
        """The model is loaded, and was built with `redundant_experts`. Raises ValueError without experts."""
        self.moved = 0
        """Experts that were copied to another slot since the start, on all ranks."""
        self.imbalance: list[float] | None = None
        """Tokens of the fullest rank over the mean, for each layer, in the last window; None before."""
        self._layers = _layers(model)
        self._ep = ep
        self._config = config
        self._steps = 0
        self._moves: Iterator[None] = iter(())
        first = self._layers[0]
        self._starts = [each.start for each in slots_of_ranks(len(first.slots.placement), ep.size)]
        shape = _buffer_shape(first, ep.size)
        device = first.slots.experts.load_X.device
        self._most = shape[0]
        # Made here, so that they are counted before the rest of the memory goes to the KV cache.
        self._sent, self._received = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2))
        self._load_LX = torch.stack([layer.slots.experts.load_X for layer in self._layers])
        self._host_LX = torch.zeros(self._load_LX.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def before_step(self) -> None:
        """Do what is due before the next step; launches work on the device and does not wait for it."""
        interval = self._config.step_interval
        place = self._steps % interval
        if self._steps and place == 0:
            self._sum_loads()
        if place == (interval - self._config.window_size) % interval:
            for layer in self._layers:
                layer.slots.experts.load_X.zero_()
        if self._steps > interval and place == SETTLING_STEPS:
            self._moves = self._rebalance()
        next(self._moves, None)
        self._steps += 1

    def copy_replicas(self) -> None:
        """Make the redundant slots equal to those of the same experts, for weights not from a checkpoint."""
        for layer in self._layers:
            experts = len(layer.slots.experts.load_X)
            for slot in range(experts, len(layer.slots.placement)):
                self._transfer(layer.experts, {slot: layer.slots.placement[slot]})

    def _sum_loads(self) -> None:
        """Sum over the ranks, on its way to the host."""
        torch.stack([layer.slots.experts.load_X for layer in self._layers], out=self._load_LX)
        self._host_LX.copy_(self._ep.all_reduce(self._load_LX), non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _rebalance(self) -> Iterator[None]:
        """Each step moves some experts, or finds that a layer needs no move."""
        if self._copied is not None:
            self._copied.synchronize()  # steps ago: it is there
        ranks = self._ep.size
        loads = self._host_LX.tolist()
        work = list(zip(loads, self._layers, strict=True))
        self.imbalance = [imbalance(load, layer.slots.placement, ranks) for load, layer in work]
        for load, (slots, experts) in work:
            target = balanced(load, slots.placement, ranks)
            for group in copies(slots.placement, target, ranks, self._most):
                self._transfer(experts, group)
                before = slots.placement
                slots.move([before[group.get(slot, slot)] for slot in range(len(before))])
                self.moved += len(group)
                yield
            yield

    def _transfer(self, experts: Experts, group: Copies) -> None:
        """Copy experts between slots, on whatever ranks; all are read before any is written."""
        rank = self._ep.rank
        ranks = range(self._ep.size)
        owner = {slot: bisect_right(self._starts, slot) - 1 for pair in group.items() for slot in pair}
        pairs = sorted(group.items())
        mine = [(slot, source) for slot, source in pairs if owner[source] == rank]
        sent = [[source for slot, source in mine if owner[slot] == each] for each in ranks]
        own = [(slot, source) for slot, source in pairs if owner[slot] == rank]
        arriving = [[slot for slot, source in own if owner[source] == each] for each in ranks]
        tensors = experts.slot_tensors()
        first = self._starts[rank]
        for row, source in enumerate(slot for each in sent for slot in each):
            self._row(self._sent[row], tensors, source - first, write=False)
        self._ep.all_to_all_rows(
            self._sent[: sum(map(len, sent))], [*map(len, sent)], [*map(len, arriving)], self._received
        )
        for row, slot in enumerate(slot for each in arriving for slot in each):
            self._row(self._received[row], tensors, slot - first, write=True)

    def _row(self, row: Tensor, tensors: Sequence[Tensor], slot: int, write: bool) -> None:
        """Read a slot into the row, or write it from there."""
        parts = [tensor[slot].view(-1).view(torch.uint8) for tensor in tensors]
        for part, place in zip(parts, row.split([part.numel() for part in parts]), strict=True):
            (part if write else place).copy_(place if write else part)


def buffer_bytes(model: nn.Module, ranks: int) -> int:
    """Memory in which a rank's experts travel. Raises ValueError without experts."""
    most, slot_bytes = _buffer_shape(_layers(model)[0], ranks)
    return 2 * most * slot_bytes


def _buffer_shape(layer: _Layer, ranks: int) -> tuple[int, int]:
    """(the most experts that a rank sends, or receives, at a time; bytes of one)."""
    slot_bytes = sum(tensor[0].nbytes for tensor in layer.experts.slot_tensors())
    own = slots_of_ranks(len(layer.slots.placement), ranks)[0]
    return max(2, min(_BYTES_PER_STEP // slot_bytes, len(own))), slot_bytes


def _layers(model: nn.Module) -> list[_Layer]:
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    found = [_Layer(each.slots, each.experts) for each in mixtures if each.slots is not None]
    if len({len(layer.slots.placement) for layer in found}) != 1:
        raise ValueError("--enable-eplb needs MoE layers with the same number of experts; omit the flag")
    return found
