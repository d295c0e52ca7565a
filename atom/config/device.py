"""Where the workers compute."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class DeviceConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; cuda means NVIDIA and ROCm alike. auto takes a GPU where torch sees one."""
    cpu_threads: Annotated[int, Meta(ge=1)] | None = None
    """Compute threads of each CPU worker; the cores shared out evenly when absent."""
    enforce_eager: bool = False
    """Capture no graphs: every step is launched kernel by kernel."""
    cudagraph_mode: Literal["FULL", "NONE"] = "FULL"
    """Decode steps on a GPU as whole graphs, or none, as with --enforce-eager."""
    cudagraph_capture_sizes: str | None = None
    """Rows of a decode step to capture, such as [1,2,4,8]; up to 512 in steps of 1, 8 and 16 when absent."""
    batch_invariant: bool = False
    """On a GPU, compute so that a request's tokens do not depend on which others run with it; slower."""
