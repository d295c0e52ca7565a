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
    """Never capture or compile graphs."""
