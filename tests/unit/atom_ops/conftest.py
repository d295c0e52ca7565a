"""Small tensors: more threads would only wait for one another."""

from collections.abc import Iterator

import pytest
import torch

from atom_ops import triton_impl


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


if triton_impl.INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, *scope: object) -> None:
        """The interpreter's scalars are arrays of one element, which numpy takes for no index."""
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_tensor_and_index
