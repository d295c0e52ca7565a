"""Where the workers compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceConfig:
    device: str = "auto"
    """auto, cpu or cuda (NVIDIA and ROCm alike). auto takes a GPU where torch sees one."""
    cpu_threads: int | None = None
    """Compute threads of each CPU worker; the cores shared out evenly when absent."""
    enforce_eager: bool = False
    """Never capture or compile graphs."""
