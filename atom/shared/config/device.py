"""The device that the workers run on."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

COMPILERS = {1: "eager", 2: "inductor"}
"""torch.compile's backend of each level that compiles."""

GraphMode = Literal["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"]


@dataclass(frozen=True)
class DeviceConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; cuda is NVIDIA and ROCm. auto uses a GPU if torch finds one."""
    cpu_threads: Annotated[int, Meta(ge=1)] | None = None
    """Most compute threads of each CPU worker; fewer compute while other programs use the CPUs. If unset: the
    cores divided by the number of workers; 1 for a model of less than 256 features."""
    enforce_eager: bool = False
    """Do not capture graphs, nor record steps on a CPU; launch every kernel of every step."""
    level: Annotated[int, Meta(ge=0, le=3)] = 3
    """0: every step runs eagerly. 1: torch.compile traces the layers and runs them eagerly, which checks that
    it can. 2: torch.compile with Inductor, which writes the kernels of norms and activations. 3: graphs of
    ATOM's own kernels. 0 to 2 capture no graphs unless --cudagraph-mode is given."""
    cudagraph_mode: GraphMode = "FULL"
    """FULL captures whole steps as GPU graphs: decode steps, and prefill and mixed steps of up to 4096
    tokens. PIECEWISE captures what lies between attention calls, which run eagerly. FULL_AND_PIECEWISE
    captures whole decode steps, and the others in pieces; FULL_DECODE_ONLY leaves the others eager. NONE
    captures nothing, as --enforce-eager. A CPU has FULL_DECODE_ONLY or NONE; it records
    the calls of a step in place of a graph."""
    cudagraph_capture_sizes: str | None = None
    """Decode batch sizes to capture, such as [1,2,4,8]. If unset: up to 512 in steps of 1, 8 and 16; on a
    CPU up to 64 in steps of 1, 2, 4 and 8."""
    batch_invariant: bool = False
    """On a GPU, make a request's logits independent of the other requests in the batch; slower."""
