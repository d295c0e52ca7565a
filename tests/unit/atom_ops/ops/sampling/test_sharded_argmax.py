"""The argmax over shards of a vocabulary is that of the whole."""

import pytest
import torch

from atom_ops import merge_argmax, shard_argmax, triton_impl
from atom_ops.op import REFERENCE
from atom_ops.triton_impl.hardware import target

triton_impl.load()
_ROWS = torch.tensor([
    [1.0, 5.0, 5.0, 2.0, 5.0, 0.0, 4.0],
    [-0.0, 0.0, -0.0, -1.0, 0.0, -2.0, -3.0],
    [-5.0, -4.0, -3.0, -2.0, -1.5, -1.0, -1.0],
    [-torch.inf] * 7,
    [-torch.inf, -torch.inf, -torch.inf, -1e38, -3e38, torch.inf, torch.inf],
    [1e-45, 0.0, 0.0, -1e-45, 0.0, 2e-45, 2e-45],
])  # fmt: skip


@pytest.mark.parametrize("name", [REFERENCE, "triton"])
@pytest.mark.parametrize("sizes", [[7], [4, 3], [1, 5, 1], [3, 2, 2]])
def test_ties_go_to_the_smallest_id(name: str, sizes: list[int]) -> None:
    if name == "triton" and not target.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    shard, merge = shard_argmax.providers[name].function, merge_argmax.providers[name].function
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = zip(_ROWS.split(sizes, 1), firsts, strict=True)
    keys_SR = torch.stack([shard(part, first) for part, first in parts])
    assert merge(keys_SR).tolist() == _ROWS.argmax(1).tolist()


def test_a_row_with_nan_gets_an_id_of_the_vocabulary() -> None:
    logits = torch.full((1, 6), torch.nan)
    keys = torch.stack(
        [shard_argmax(part, first) for part, first in zip(logits.split(3, 1), (0, 3), strict=True)]
    )
    assert 0 <= merge_argmax(keys).item() < 6
