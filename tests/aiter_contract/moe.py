"""AITER's shuffled weights and fused mixture of experts."""

from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional


class ActivationType(Enum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2


def shuffle_weight(x: Tensor, layout: tuple[int, int]) -> Tensor:
    """Tiles of layout[0] rows and 2 * layout[1] columns, rows after columns; the result is marked."""
    tile_rows, tile_columns = layout[0], 2 * layout[1]
    assert x.shape[-2] % tile_rows == 0 and x.shape[-1] % tile_columns == 0
    lane = 16 // x.element_size()
    shape = (x.shape[-2] // tile_rows, tile_rows, x.shape[-1] // tile_columns, tile_columns // lane, lane)
    shuffled = x.reshape(-1, *shape).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


def _plain(shuffled: Tensor) -> Tensor:
    assert getattr(shuffled, "is_shuffled", False), "the kernels read shuffled weights"
    experts, outputs, inputs = shuffled.shape
    lane = 16 // shuffled.element_size()
    tiles = shuffled.view(experts, outputs // 16, inputs // 32, 32 // lane, 16, lane)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(experts, outputs, inputs)


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
) -> Tensor:
    """w1 [E, 2I, D]: the gate's rows, then up's; w2 [E, D, I]. The mask is 1 for the experts here."""
    assert activation is ActivationType.Silu and quant_type is QuantType.No
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert hidden_states.is_contiguous() and hidden_states.dtype == w1.dtype == w2.dtype
    assert w1.shape[1:] == (2 * w2.shape[2], w2.shape[1]) and hidden_states.shape[1] == w2.shape[1]
    every = torch.ones(len(w1), dtype=torch.int32) if expert_mask is None else expert_mask
    assert every.dtype == torch.int32 and every.sum() == len(w1)
    assert ((topk_ids >= 0) & (topk_ids < len(every))).all()
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    gate_up, down = _plain(w1).float(), _plain(w2).float()
    for here, number in enumerate(every.nonzero().flatten().tolist()):
        tokens, places = (topk_ids == number).nonzero(as_tuple=True)
        gate, up = (hidden_states[tokens].float() @ gate_up[here].T).chunk(2, -1)
        y = (functional.silu(gate) * up) @ down[here].T
        out.index_add_(0, tokens, y * topk_weight[tokens, places, None])
    return out.to(hidden_states.dtype)
