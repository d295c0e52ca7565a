"""PDL (programmatic dependent launch): a kernel starts while the previous one still runs.

On NVIDIA GPUs from Hopper on, programs of a kernel can start on SMs that the previous kernel has
left, before it ends. They prefetch what does not depend on it: the weights.

    pdl_wait                 waits until all previous kernels are done and their results visible
    pdl_launch_dependents    lets the next kernel start once every program of this one has called it
    pdl_begin                both, for a kernel without weights to prefetch

Calling `pdl_launch_dependents` too early makes the two kernels compete for memory bandwidth; a GEMV
calls it after it has issued the loads of all of its weights.

Every program of a kernel that is launched with `launch_options` must call `pdl_wait` before it
reads anything but weights, before it writes anything, and before it returns. Then "the previous
kernel is done" implies that all kernels before it are done, because it waited for them. So nothing
is read too early, and reused memory (a freed tensor, a workspace) is not written while an older
kernel reads it. That also holds for a kernel without PDL, which waits for its predecessor to end.
Weights are tensors that no kernel of a step writes; after loading them the host synchronises.

What was complete before a step's first layer may also be read before `pdl_wait`: the step's inputs (block
tables, contexts, slots), and what earlier steps wrote to the cache. The embedding kernel runs after those
that make the inputs, and waits for them before it lets the next kernel start: no kernel of a layer starts
before they have ended. Such reads go past the L1 cache, which may hold older bytes (`.cg`).

Elsewhere (PDL false) these functions compile to nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.target import INTERPRETED

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton for AMD alone: nothing is launched with PDL there
    gdc_launch_dependents = gdc_wait = None

_HOPPER = (9, 0)
_FETCHED_BYTES = 16 << 20
"""Most bytes of a weight that are worth prefetching into the L2 cache."""


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)


@triton.jit
def prefetch_rows(first, rows, stride, size, PDL: tl.constexpr):
    """Prefetch `size` bytes of each row, `stride` bytes apart, into the L2 cache.

    One thread prefetches one row, so there must be at least as many threads as rows. `first`
    points to weights; `first`, `stride` and `size` must be multiples of 16 bytes.

    Prefetching what follows the first tiles of a GEMV or of a stream-K GEMM made steps slower on
    an H200: Qwen3-8B at batch 1 took 4.24 ms instead of 4.10, on two GPUs 2.51 instead of 2.36.
    """
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            .reg .u32 row;
            .reg .u64 place;
            mov.u32 row, %tid.x;
            setp.lt.u32 mine, row, $2;
            mad.wide.u32 place, row, $3, $1;
            @mine cp.async.bulk.prefetch.L2.global [place], $4;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [first.to(tl.uint64), rows, stride, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def fits_cache(weight: Tensor) -> bool:
    """Whether a weight is so small that `prefetch_rows` of all of it pays."""
    return weight.numel() * weight.element_size() <= _FETCHED_BYTES


def fetched_columns(weight: Tensor) -> int:
    """How many columns of a weight of 8 bits are worth a `prefetch_rows`."""
    return _FETCHED_BYTES // len(weight)


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """The launch arguments of every kernel with PDL."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
