"""Blocks of a GPU go to pinned memory and to files on a stream of their own, and come back."""

import time
from pathlib import Path

import pytest
import torch

from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, BlockCopy, BlocksCopied, CopyBlocks, TierSlots
from atom_ops.ops.attention.kv_cache import FP8, make_kv_layer
from workers.memory.block_rows import BlockRows
from workers.memory.disk_tier import DiskTier
from workers.memory.host_tier import HostTier
from workers.memory.tier_copier import KVTier, TierCopier

GPU = torch.device("cuda", 0)
BLOCKS = 96
DEADLINE_S = 60.0
_SLEEP_CYCLES = 1_000_000_000

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def next_of(copier: TierCopier) -> BlocksCopied:
    deadline = time.monotonic() + DEADLINE_S
    while (done := copier.next_copied()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.0001)
    return done


def tier_of(medium: str, size: int, directory: Path) -> KVTier:
    if medium == DISK:
        return DiskTier(directory / "kv" / "rank", 1, 4, size, GPU)
    return HostTier(TierSlots(medium, [BLOCKS]).num_slots, [size], GPU, 1 << 40)


@pytest.mark.parametrize("medium", [HOST_MEMORY, DISK])
def test_blocks_come_back_while_the_device_computes(medium: str, tmp_path: Path) -> None:
    layers = [
        make_kv_layer(BLOCKS, 16, 8, 128, dtype, GPU) for dtype in (torch.bfloat16, FP8) for _ in range(8)
    ]
    tensors = [tensor for layer in layers for tensor in (layer.kv, layer.scale) if tensor is not None]
    size = sum(tensor[0].nbytes for tensor in tensors)
    tier = tier_of(medium, size, tmp_path)
    copier = TierCopier([BlockRows(layers, BLOCKS, size)], [tier], 0)
    bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
    for tensor in bytes_of:
        tensor.copy_(torch.randint(0, 255, tensor.shape, device=GPU, dtype=torch.uint8))
    torch.cuda.synchronize()
    copies = [BlockCopy(0, block, block, block.to_bytes(8, "little"), b"ids") for block in range(BLOCKS)]
    copier.submit(CopyBlocks(0, 0, False, copies))  # the first copy also prepares its stream
    assert next_of(copier) == BlocksCopied(0, 0)
    torch.cuda._sleep(_SLEEP_CYCLES)
    step_in_flight = torch.cuda.Event()
    step_in_flight.record()
    copier.submit(CopyBlocks(1, 0, False, copies))
    assert next_of(copier) == BlocksCopied(0, 1)
    assert not step_in_flight.query()
    expected = [tensor.clone() for tensor in bytes_of]
    matrix = torch.randn(4096, 4096, device=GPU)
    for tensor in bytes_of:  # launched, not done, when the blocks are asked for
        matrix = torch.nn.functional.normalize(matrix @ matrix)
        tensor.zero_()
    started = time.monotonic()
    copier.submit(CopyBlocks(2, 0, True, copies))
    assert next_of(copier) == BlocksCopied(0, 2)
    print(f"{medium}: {size * BLOCKS / (time.monotonic() - started) / 1e9:.1f} GB/s")
    assert all(map(torch.equal, bytes_of, expected))
    copier.close()
    if isinstance(tier, DiskTier):
        tier.close()
