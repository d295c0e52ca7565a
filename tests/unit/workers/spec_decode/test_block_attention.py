"""The attention of drafted blocks: what each token sees, in plans of the host and of the device."""

import pytest
import torch

from atom_ops import AttentionRule, backend, native_impl, paged_attention
from atom_ops.ops.attention.kv_cache import make_kv_layer, write_kv
from atom_ops.triton_impl.hardware import target
from workers.spec_decode.block_attention import Blocks
from workers.spec_decode.drafter import BlockView

CPU = torch.device("cpu")
WIDTH, BLOCK_SIZE, HEADS, KV_HEADS, FEATURES = 5, 4, 6, 2, 16
LASTS = [30, 0, 17, 9, -1]
"""The first position of each block; the last one is padding."""
ENDS = [35, 5, 19, 11, 0]
"""Where each block ends: two do at a limit, after 2 tokens."""
KERNELS = {"native": native_impl.runs_on(CPU), "triton": target.INTERPRETED}
"""Those that read a plan on the device, and whether they run here."""


def sees(view: BlockView, window: int, query: int, key: int, end: int) -> bool:
    is_near = not window or query - key < window
    return key < end and is_near and (key <= query or view is not BlockView.CAUSAL)


@pytest.mark.parametrize(
    ("view", "window"),
    [
        (BlockView.WHOLE, 0),
        (BlockView.CAUSAL, 0),
        (BlockView.CAUSAL, 6),
        (BlockView.AHEAD, 6),
        (BlockView.AHEAD, 12),
    ],
)
@pytest.mark.parametrize(
    ("provider", "on_host"),
    [
        *((name, True) for name in ("torch", "sdpa_cpu")),
        *((name, on_host) for name, runs in KERNELS.items() if runs for on_host in (True, False)),
    ],
)
@pytest.mark.parametrize(("split", "most_rows"), [(0, len(LASTS)), (256, len(LASTS)), (0, 1)])
def test_what_each_token_of_a_block_sees(
    view: BlockView, window: int, provider: str, on_host: bool, split: int, most_rows: int
) -> None:
    if split and provider == "native":
        pytest.skip("the kernels of CPUs split no contexts")
    backend.resolve(CPU, [provider])
    generator = torch.Generator().manual_seed(3)
    rows = [row for row, end in enumerate(ENDS) if end or not on_host][:most_rows]  # a host's have no padding
    blocks = -(-max(ENDS) // BLOCK_SIZE)
    table = torch.randperm(len(ENDS) * blocks, generator=generator).view(-1, blocks).int()
    cache = make_kv_layer(len(ENDS) * blocks, BLOCK_SIZE, KV_HEADS, FEATURES, torch.float32, CPU)
    k, v = torch.randn(2, len(ENDS) * blocks * BLOCK_SIZE, KV_HEADS, FEATURES, generator=generator)
    write_kv(k, v, cache, torch.arange(len(k)))
    q = torch.randn(len(rows) * WIDTH, HEADS, FEATURES, generator=generator)
    made = Blocks(
        WIDTH,
        torch.tensor(LASTS)[rows],
        torch.tensor(ENDS, dtype=torch.int32)[rows],
        table[rows],
        max(ENDS),
        split,
    )
    found = paged_attention(q, cache, made.plan(view, on_host), AttentionRule(FEATURES**-0.5, window))
    for number, row in enumerate(rows):
        slots = (
            table[row].repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
            + torch.arange(blocks * BLOCK_SIZE) % BLOCK_SIZE
        )
        for place in range(ENDS[row] - LASTS[row] if ENDS[row] else 0):
            at = LASTS[row] + place
            seen = [key for key in range(ENDS[row]) if sees(view, window, at, key, ENDS[row])]
            keys, values = (part[slots[seen]].repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
            query = q[number * WIDTH + place]
            weights = (torch.einsum("he,she->hs", query, keys) * FEATURES**-0.5).softmax(-1)
            expected = torch.einsum("hs,she->he", weights, values)
            torch.testing.assert_close(found[number * WIDTH + place], expected, atol=1e-5, rtol=1e-5)
