"""Blocks of one KV group as rows of bytes: what all of its layers cache, one after another.

N blocks, S bytes of a block on this rank, U units of eight bytes or one. Reading and writing may be done in
another thread than steps, if no step uses these blocks meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_ops import BlockTensors, gather_block_rows, scatter_block_rows, to_device
from workers.layers.context import CacheLayer

__all__ = ["BlockRows"]


class BlockRows:
    """The tensors of a group's layers, whose first dimension is the block, or a place in it."""

    def __init__(self, layers: Sequence[CacheLayer], num_blocks: int, num_bytes: int, places: int = 1):
        """`num_bytes`: of a block in all layers, as the group's spec says.

        Of a block that has several `places` only the first one is read and written.
        Raises ValueError for a cache that is not made of blocks of that size.
        """
        self.num_bytes = num_bytes
        self._places = places
        entries = num_blocks * places
        tensors = [tensor for layer in layers for tensor in _tensors(layer) if tensor.dim() > 1]
        found = sum(tensor[0].nbytes for tensor in tensors)
        if found != num_bytes or any(len(each) != entries or not each.is_contiguous() for each in tensors):
            name = type(layers[0]).__name__
            raise ValueError(
                f"--kv-offload-memory: the cache of {name} has {found} bytes in a block and not {num_bytes}, "
                "or another layout than one block after another; omit the flag"
            )
        self.layouts = [f"{tensor.dtype} {list(tensor.shape[1:])}" for tensor in tensors]
        """dtype and shape of a block in each tensor."""
        self.device = tensors[0].device
        self.num_blocks = num_blocks
        self.regions = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        """Address and bytes of each tensor."""
        self.places = [(each.data_ptr(), each[0].nbytes * places, each[0].nbytes) for each in tensors]
        """Each tensor's address, the bytes from one block to the next, and those of a block in a row."""
        # Eight bytes are gathered and scattered as fast as one.
        self._unit = torch.uint8 if any(tensor[0].nbytes % 8 for tensor in tensors) else torch.int64
        self._blocks = BlockTensors(tuple(tensor.view(entries, -1).view(self._unit) for tensor in tensors))
        # numpy copies in this thread alone; torch would start threads of its own for it.
        on_cpu = self.device.type == "cpu"
        self._arrays = [tensor.numpy() for tensor in self._blocks.tensors] if on_cpu else []
        if not on_cpu:
            none = torch.empty(0, num_bytes, dtype=torch.uint8, device=self.device)
            self.read([], none)  # loads the kernels before another thread needs them
            self.write([], none)

    def read(self, blocks: Sequence[int], rows_NS: torch.Tensor) -> None:
        """Copy blocks to rows of bytes on the same device."""
        if self._arrays:
            start = 0
            rows = rows_NS.view(self._unit).numpy()
            for array in self._arrays:
                end = start + array.shape[1]
                rows[:, start:end] = array[self._entries(blocks)]
                start = end
            return
        blocks_N = to_device(self._entries(blocks), self.device)
        gather_block_rows(self._blocks, blocks_N, rows_NS.view(self._unit))

    def write(self, blocks: Sequence[int], rows_NS: torch.Tensor) -> None:
        """Copy rows of bytes on the same device to blocks."""
        if self._arrays:
            start = 0
            rows = rows_NS.view(self._unit).numpy()
            for array in self._arrays:
                end = start + array.shape[1]
                array[self._entries(blocks)] = rows[:, start:end]
                start = end
            return
        blocks_N = to_device(self._entries(blocks), self.device)
        scatter_block_rows(self._blocks, blocks_N, rows_NS.view(self._unit))

    def _entries(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        return np.array(blocks, np.int64) * self._places


def _tensors(cache: CacheLayer) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield cache
    elif is_dataclass(cache):
        for part in fields(cache):
            yield from _tensors(getattr(cache, part.name))
