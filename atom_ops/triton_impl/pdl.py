"""A kernel that starts while the one before it still runs: programmatic dependent launch.

NVIDIA GPUs from Hopper on can place a kernel's programs on num_sms that the kernel before
it leaves free, before that one is done. What the new programs need not wait for, weights in
the first place, is on its way from memory by then.

    wait             until the kernels before this one are done and their results are visible
    pdl_launch_dependents   the next kernel may come as soon as every program of this one has said so
    begin            both, for a kernel without weights worth asking for early

Saying so too early makes a kernel share the memory's bandwidth with the one that waits for it:
products of one token say it when they have asked for all of their weights.

The rule, for every kernel that is launched with `launch_options`: each of its programs waits
before it reads anything but weights, before it writes anything at all, and before it returns,
however early. Then "the kernel before is done" means that all before it are done too: it has
waited for them itself. So nothing is read too early, no memory that is used again (a freed
tensor, a workspace) is written while an older kernel reads it, and a kernel launched in the
ordinary way, which waits for all of its predecessor, still finds everything before it done.
Weights are what no kernel of a step writes; after loading them the host waits for the device.

Elsewhere (PDL false) both words compile to nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom_ops.triton_impl import INTERPRETED

_HOPPER = (9, 0)


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
    """Bring `size` bytes of each of the rows, `stride` bytes apart, nearer: into the L2 cache.

    A thread asks for one row, so there may not be more of these than threads; nobody waits for
    them. `first` points to weights; it and both counts of bytes are multiples of 16.
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


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """The arguments that every kernel here is launched with."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
