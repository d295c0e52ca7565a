"""Token embedding, of the whole vocabulary or one rank's shard."""

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT


def _case(tokens: int, local: int, first_id: int, hidden: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        ids = torch.randint(0, local + first_id + 5, (tokens,), generator=generator)
        return ids, torch.randn(local, hidden, generator=generator).to(dtype), first_id

    return Case(f"{tokens}x{local}+{first_id}x{hidden}", make)


@op([_case(1, 100, 0, 48), _case(50, 100, 37, 48), _case(3, 20, 0, 2560)], EXACT)
def embedding(ids_T: Tensor, weight_VD: Tensor, first_id: int) -> Tensor:
    """The ids' rows of `weight_VD`, which has ids first_id … first_id + V - 1; zeros for other ids.

    So the results of all ranks with a shard of the vocabulary can be all-reduced.
    """
    local_T = ids_T - first_id
    outside_T = (local_T < 0) | (local_T >= weight_VD.shape[0])
    found_TD = functional.embedding(local_T.masked_fill(outside_T, 0), weight_VD)
    return found_TD.masked_fill_(outside_T[:, None], 0)
