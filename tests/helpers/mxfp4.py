"""Experts packed as the checkpoints of GPT-OSS keep them."""

import torch

Tensors = dict[str, torch.Tensor]


def packed_experts(matrices: Tensors) -> tuple[Tensors, Tensors]:
    """Random MXFP4 tensors in the place of the matrices [X, I, O], and the numbers they stand for."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    packed, plain = {}, {}
    for name, matrix in matrices.items():
        experts, inputs_, outputs = matrix.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs_), generator=generator)
        scales = torch.randint(120, 126, (experts, outputs, inputs_ // 32), generator=generator)
        blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).unflatten(-1, (-1, 16))
        packed[f"{name}_blocks"] = blocks.to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        sign = torch.where(codes >= 8, -1.0, 1.0)
        values = sign * torch.tensor(magnitudes)[codes % 8]
        plain[name] = (
            (values * (2.0 ** (scales - 127)).repeat_interleave(32, -1)).transpose(1, 2).contiguous()
        )
    return packed, plain
