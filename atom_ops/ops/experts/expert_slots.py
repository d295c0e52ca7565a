"""From experts to the slots that hold them, where experts may have replicas; and the tokens of each expert.

T tokens, J experts per token, X experts, R the most replicas of an expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """The slots of each expert, int32, and how many tokens it got; changed in place between steps."""

    slots_XR: Tensor
    """The slots of each expert; only the first `replicas_X` of a row are valid."""
    replicas_X: Tensor
    """1 to R."""
    load_X: Tensor
    """Tokens that selected each expert since this was last set to 0."""


def _case(tokens: int, top_k: int, experts: int, most: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ExpertSlots]:
        def numbers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        ids = numbers(-1, experts + 1, tokens, top_k)  # some are of no expert
        slots = numbers(0, experts * most, experts, most).int()
        replicas = numbers(1, most + 1, experts).int()
        load = numbers(0, 100, experts).int()
        return ids, ExpertSlots(slots, replicas, load)

    return Case(f"{tokens}x{top_k}of{experts}x{most}", make)


@op([_case(1, 8, 128, 1), _case(7, 2, 5, 3), _case(300, 4, 33, 17), _case(3, 1, 1, 2)])
def select_slots(topk_ids_TJ: Tensor, experts: ExpertSlots) -> Tensor:
    """The slot of each selected expert, int64 [T, J]; -1 for ids of no expert. Adds to `load_X`.

    Token t takes replica t modulo the number of replicas: ranks with the same tokens agree.
    """
    valid_TJ = (topk_ids_TJ >= 0) & (topk_ids_TJ < len(experts.load_X))
    known_TJ = topk_ids_TJ.where(valid_TJ, 0)
    experts.load_X.index_add_(0, known_TJ.flatten(), valid_TJ.flatten().int())
    token_T1 = torch.arange(len(topk_ids_TJ), device=topk_ids_TJ.device).unsqueeze(1)
    replica_TJ = token_T1 % experts.replicas_X[known_TJ]
    return experts.slots_XR[known_TJ, replica_TJ].long().where(valid_TJ, -1)
