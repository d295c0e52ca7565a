"""What kernels in Gluon for Hopper use to hand tiles from one warp to another."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# These two have other names in later versions of Triton.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""TMA: copies a tile to shared memory and then arrives at a barrier."""
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits for all threads of a program, or of a partition of its warps."""


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each stage, which completes with COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(made.index(slot), count=COUNT)
    return made


@gluon.jit
def release(barrier, pred=True):
    """Arrive at the barrier once all warps of the caller are done with what it guards."""
    thread_barrier()
    mbarrier.arrive(barrier, pred=pred)
