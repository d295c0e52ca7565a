"""What `atom doctor` found, and its text."""

import textwrap
from collections import Counter
from collections.abc import Iterator

import msgspec

from atom.commands.host import Cache, Cpu, Host
from atom.shared.messages.doctor import AmdGpus, Devices, Library
from atom.shared.utils.sizes import size_text
from atom.shared.utils.version import atom_version


class Report(msgspec.Struct, frozen=True):
    """All that `atom doctor` shows."""

    can_serve: bool
    problems: list[str]
    """Why no model can be served, each with what to do."""
    warnings: list[str]
    host: Host
    devices: Devices
    libraries: dict[str, Library]
    hub: str | None
    """Whether the hub responds; None: not tried."""
    amd: AmdGpus | None = None
    """What AMD's library finds; None: AMD's driver is not loaded."""


_WIDTH = 110
_LABEL = 10


def report_text(report: Report) -> str:
    """A line for each subject, then the verdict."""
    lines = [f"ATOM {atom_version()}: what this machine has"]
    for label, text in [*_rows(report), *_verdict(report)]:
        indent = " " * (_LABEL + 3)
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {label:<{_LABEL}} ",
            subsequent_indent=indent,
            break_long_words=False,
        )
    return "\n".join(lines)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    host = report.host
    devices = report.devices
    yield "CPU", _cpu(host.cpu)
    yield "memory", _memory(host.cpu)
    yield "GPUs", _gpus(devices)
    if host.visible:
        yield "visible", ", ".join(f"{name}={value}" for name, value in host.visible.items())
    if report.amd is not None:
        yield "AMD", _amd(report.amd)
    if host.driver:
        yield "driver", host.driver
    links = host.links or (report.amd.links if report.amd is not None else [])
    if links:
        yield "links", "; ".join(links)
    yield "torch", devices.torch or devices.error
    yield (
        "packages",
        ", ".join(
            f"{each.name} {each.version or 'missing'}{f' ({each.needs})' if each.needs else ''}"
            for each in host.packages
        ),
    )
    for device, ops in devices.ops.items():
        yield "ops", f"{device}: {ops}"
    for name, library in report.libraries.items():
        version = f"{library.version}: " if library.version and library.error else library.version
        yield name, f"{version}{library.error}"
    soft, hard = (_limit(value) for value in host.open_files)
    shared = host.shared_memory_bytes
    free = "none" if shared is None else f"{size_text(shared)} free"
    yield "compiler", host.compiler or "none"
    if host.cache is not None:
        yield "cache", _cache(host.cache)
    yield "limits", f"open files {soft} (at most {hard}), /dev/shm {free}"
    yield "port", f"{host.port} is {'free' if host.port_is_free else 'in use'}"
    if report.hub is not None:
        yield "hub", report.hub


def _verdict(report: Report) -> Iterator[tuple[str, str]]:
    for text in report.warnings:
        yield "warning", text
    for text in report.problems:
        yield "problem", text
    where = "GPU" if report.devices.gpus else "CPU"
    yield "result", f"a model can be served on the {where}" if report.can_serve else "no model can be served"


def _cpu(cpu: Cpu) -> str:
    quota = "" if cpu.cpu_quota is None else f" (the control group allows {cpu.cpu_quota:g})"
    return f"{cpu.name}, {cpu.cores} cores{quota}, {', '.join(cpu.instructions) or 'no vector instructions'}"


def _memory(cpu: Cpu) -> str:
    limit = (
        "" if cpu.limit_bytes is None else f", limited to {size_text(cpu.limit_bytes)} by the control group"
    )
    return f"{size_text(cpu.available_bytes)} available of {size_text(cpu.total_bytes)}{limit}"


def _gpus(devices: Devices) -> str:
    kinds = Counter((gpu.name, gpu.capability, gpu.total_bytes) for gpu in devices.gpus)
    free = min((gpu.free_bytes for gpu in devices.gpus), default=0)
    each = [
        f"{count} x {name} ({capability}), {size_text(total)} each"
        for (name, capability, total), count in kinds.items()
    ]
    return f"{'; '.join(each)}, at least {size_text(free)} free" if each else devices.gpu_problem or "none"


def _amd(found: AmdGpus) -> str:
    """All GPUs of the driver."""
    if found.error:
        return f"amdsmi: {found.error}"
    kinds = Counter((gpu.name, gpu.architecture, gpu.total_bytes) for gpu in found.gpus)
    gpus = "; ".join(
        f"{count} x {name} ({architecture}), {size_text(total)} each"
        for (name, architecture, total), count in kinds.items()
    )
    return (
        f"{gpus or 'no GPUs'} on this host; ROCm {found.rocm or 'not found'}, driver {found.driver or 'none'}"
    )


def _cache(cache: Cache) -> str:
    return cache.path + (f": {cache.problem}" if cache.problem else f", {size_text(cache.free_bytes)} free")


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
