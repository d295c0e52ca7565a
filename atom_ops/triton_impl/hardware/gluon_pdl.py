"""The functions of `pdl` for kernels in Gluon, which cannot call those."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pdl_wait(PDL: gl.constexpr):
    """As `pdl.pdl_wait`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pdl_launch_dependents(PDL: gl.constexpr):
    """As `pdl.pdl_launch_dependents`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
