"""Scales of whole rows: of each output of a matrix, or of the whole matrix."""

from functools import cache

import torch
from torch import Tensor

from workers.layers.quantization.fills import constant_fill
from workers.layers.quantization.scheme import FLOATS, WHOLE, Matrix, StoredTensor

_ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@cache
def row_scales(codes_std: float, per_tensor: bool, *names: str) -> StoredTensor:
    """Scales [O, 1] of a matrix; one for the whole tensor is repeated for its rows."""
    return StoredTensor(
        "_scales", (1, WHOLE), FLOATS, constant_fill(codes_std), torch.float32, names=names,
        disk_shapes=_one if per_tensor else _rows,
        decode=_repeated if per_tensor else _column,
        stacked=None if per_tensor else "_scale",
    )  # fmt: skip


def one_number(tensor: Tensor, matrix: Matrix) -> Tensor:
    """A number stored with any number of dimensions, as [1, 1]."""
    return tensor.reshape(1, 1)


def _one(matrix: Matrix) -> tuple[tuple[int, ...], ...]:
    return _ONE


shapes_of_one = _one
"""The shapes in which one number is stored."""


def _rows(matrix: Matrix) -> tuple[tuple[int, ...], ...]:
    return (matrix[0], 1), (matrix[0],)


def _repeated(scale: Tensor, matrix: Matrix) -> Tensor:
    return scale.reshape(1, 1).expand(matrix[0], 1)


def _column(scales: Tensor, matrix: Matrix) -> Tensor:
    return scales.reshape(matrix[0], 1)
