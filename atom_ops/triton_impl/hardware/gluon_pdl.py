"""The functions of `pdl` for kernels in Gluon, which cannot call those.

Inline assembly must have a result: `// $0` names one that nothing uses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pdl_wait(PDL: gl.constexpr):
    """Same as `pdl.pdl_wait`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pdl_launch_dependents(PDL: gl.constexpr):
    """Same as `pdl.pdl_launch_dependents`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
