"""Small tensors: one thread is fastest."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atom_ops.triton_impl.hardware import target


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


if target.INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    splat = interpreter.InterpreterBuilder.create_splat

    def patch_tensor_and_index(tensor: type, *scope: object) -> None:
        """The interpreter's scalars are arrays of one element, which numpy does not accept as an index."""
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # type: ignore[attr-defined]

    def splat_truth(builder: object, block: object, scalar: Any) -> Any:
        """There a comparison of scalars has their type; as a block it must be a mask."""
        if scalar.data.dtype != np.bool_:
            return splat(builder, block, scalar)
        return interpreter.TensorHandle(np.full(block.shape, scalar.data), tl.int1)  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_splat = splat_truth
