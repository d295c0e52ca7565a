"""What MORI is asked for: which kernels, with how many blocks, and how much symmetric memory they take.

Nothing here imports MORI. The sizes are those of amd-mori 1.2, whose buffers have a fixed size; R is the
number of tokens that a rank may receive, S what it may send:

    kernels of one node        R received, R returned, S summed
    kernels of several nodes   the same, and tokens on their way between the nodes: 1 + 3 x nodes times S
    AsyncLL                    the same as one node, and R on their way for either direction
"""

import os
import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

KernelName = Literal["IntraNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL"]

HEAP_VARIABLE = "MORI_SHMEM_HEAP_SIZE"
LOW_LATENCY_TOKENS = 128
"""Most tokens of a rank for which latency counts and not bandwidth, as MORI's authors measure."""
_WARP = 64
_GPUS_OF_A_NODE = (1, 2, 4, 8)
_GIB = 1 << 30
_SPARE_BYTES = 64 << 20  # signals, barriers and MORI's own buffers
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": _GIB}


class Launch(NamedTuple):
    """How a kernel is launched: thread blocks, of these blocks for RDMA, warps of a block."""

    blocks: int
    rdma_blocks: int
    warps: int

    def fitting(self, compute_units: int) -> "Launch":
        """At most one block for each compute unit: blocks wait for one another, so all must run at once."""
        blocks = min(self.blocks, compute_units)
        rdma_blocks = min(self.rdma_blocks, blocks // 2)
        return self._replace(blocks=blocks, rdma_blocks=rdma_blocks)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One of MORI's kernel types, for steps of at most `max_tokens` tokens of each rank."""

    name: KernelName
    launch: Launch
    max_tokens: int = 0
    queue_pairs: int = 1

    @property
    def asynchronous(self) -> bool:
        """Whether sending and receiving are two calls."""
        return self.name == "AsyncLL"


# What AMD's own engines launch.
_ONE_NODE_FEW = Kernels("IntraNode", Launch(64, 0, 4))
_ONE_NODE = Kernels("IntraNode", Launch(128, 0, 16))
_NODES_FEW = Kernels("InterNodeV1LL", Launch(32, 16, 16))
_NODES = Kernels("InterNodeV1", Launch(32, 16, 16))
_ASYNC_FEW = Kernels("AsyncLL", Launch(64, 32, 8), queue_pairs=2)


def layout_problem(ranks: int, nodes: int) -> str | None:
    """Why MORI cannot connect that many ranks, spread evenly over the nodes; or None."""
    each, uneven = divmod(ranks, nodes)
    if uneven or each not in _GPUS_OF_A_NODE:
        count = f"{ranks} GPUs on {nodes} nodes" if nodes > 1 else f"{ranks} GPUs"
        return f"MORI needs 1, 2, 4 or 8 GPUs on each node, the same on all, not {count}"
    return None


def kernels_for(nodes: int, max_tokens: int, compute_units: int, ranks: int) -> tuple[Kernels, ...]:
    """The kernels for every number of tokens up to `max_tokens` of a rank, those for the fewest first.

    AsyncLL copies by the GPU's DMA engines, and is chosen where the user lets MORI use them
    (MORI_ENABLE_SDMA=1): MORI itself warns of it otherwise. MORI_ENABLE_RAIL_ONLY keeps it from other nodes.
    """
    few, many = (_NODES_FEW, _NODES) if nodes > 1 else (_ONE_NODE_FEW, _ONE_NODE)
    reaches_all = nodes == 1 or not _switched_on("MORI_ENABLE_RAIL_ONLY")
    if _switched_on("MORI_ENABLE_SDMA") and reaches_all and ranks <= compute_units:
        few = _ASYNC_FEW
    sizes = sorted({min(max_tokens, LOW_LATENCY_TOKENS), max_tokens})
    return tuple(
        replace(kernels, launch=kernels.launch.fitting(compute_units), max_tokens=size)
        for kernels, size in zip((few, many), sizes, strict=False)
    )


def settings_problem() -> str | None:
    """Why MORI cannot run with this environment, or None."""
    variable = "MORI_EP_LAUNCH_CONFIG_MODE"
    if os.environ.get(variable, "").upper() == "AUTO":
        # More blocks than compute units wait for one another for ever.
        return f"{variable}=AUTO makes MORI ignore the numbers of blocks that fit this GPU: leave it unset"
    return None


def _switched_on(variable: str) -> bool:
    """Whether MORI takes the variable for on: whatever is no word for off."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "off", "no")


class Tokens(NamedTuple):
    """What is sent: tokens of a model's MoE layers."""

    hidden: int
    dtype: torch.dtype
    top_k: int
    """Experts of a token."""
    experts: int
    """Experts of all ranks."""


def check_tokens(tokens: Tokens) -> None:
    """Raises ValueError for tokens that MORI does not send."""
    if tokens.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"MORI sends no {tokens.dtype}; use --dtype bfloat16")
    if tokens.top_k >= _WARP:
        raise ValueError(
            f"MORI sends tokens with less than {_WARP} experts each, not {tokens.top_k}; "
            "use --all2all-backend allgather_reducescatter or alltoall"
        )


def symmetric_bytes(kernels: tuple[Kernels, ...], tokens: Tokens, ranks: int, nodes: int) -> int:
    """Symmetric memory that every rank reserves for its buffers, each kernel type's own."""
    return _SPARE_BYTES + sum(_buffer_bytes(each, tokens, ranks, nodes) for each in op_kernels(kernels))


def op_kernels(kernels: tuple[Kernels, ...]) -> list[Kernels]:
    """The kernels for the most tokens of each kernel type, which serve fewer tokens, too."""
    return list({each.name: each for each in kernels}.values())


def _buffer_bytes(kernels: Kernels, tokens: Tokens, ranks: int, nodes: int) -> int:
    sent = kernels.max_tokens
    received = kernels.max_tokens * ranks
    row = tokens.hidden * tokens.dtype.itemsize
    message = row + 4 * (2 * tokens.top_k + 1)  # ids and weights, and the token's number
    total = (received + sent) * row  # what dispatch and combine return
    match kernels.name:
        case "IntraNode":
            total += received * message
        case "InterNodeV1" | "InterNodeV1LL":
            total += (received + (3 * nodes + 1) * sent) * message
        case "AsyncLL":
            total += 3 * received * message
    total += 5 * received * tokens.top_k * 4  # weights on three ways, ids on two
    total += received * (tokens.experts // ranks) * 4  # where each came from
    return total


_COMPUTED: dict[str, str] = {}
"""The value that this process has set itself: a plan of several layouts sets one after another."""


def reserve_heap(needed: int) -> None:
    """Give MORI a heap for `needed` bytes in this process, before it starts.

    Raises ValueError if MORI_SHMEM_HEAP_SIZE is set and too small, or not a size.
    """
    if os.environ.get("MORI_SHMEM_MODE", "").upper() == "ISOLATION":
        return  # memory is taken as it is needed
    text = os.environ.get(HEAP_VARIABLE)
    if not text or text == _COMPUTED.get(HEAP_VARIABLE):
        os.environ[HEAP_VARIABLE] = _COMPUTED[HEAP_VARIABLE] = heap_text(needed)
        return
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{HEAP_VARIABLE}={text} is no size: write {heap_text(needed)}, or leave it unset")
    if int(found[1]) * _UNITS[found[2].upper()] < needed:
        raise ValueError(
            f"{HEAP_VARIABLE}={text} is too small: MORI's buffers take {needed / _GIB:.1f} GiB on each rank. "
            f"Set it to {heap_text(needed)}, leave it unset, or lower --max-num-batched-tokens"
        )


def heap_text(needed: int) -> str:
    """The least heap in whole GiB, as MORI reads it: 3G."""
    return f"{-(-needed // _GIB)}G"
