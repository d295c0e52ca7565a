"""`python -m workers.describe_devices`: torch, its devices, and the op providers that run on them.

Prints a `Devices` as the last line on standard output.
"""

import sys
from typing import TYPE_CHECKING

import msgspec

from atom.shared.messages.doctor import Devices, DevicesLaunch, Gpu
from atom.shared.utils import optional_library
from atom.shared.utils.errors import one_line
from atom.shared.utils.process import read_launch

if TYPE_CHECKING:
    import torch


def main() -> None:
    optional_library.remember(optional_library.AITER, read_launch(DevicesLaunch).aiter)
    sys.stdout.write("\n" + msgspec.json.encode(describe()).decode() + "\n")


def describe() -> Devices:
    """What torch finds here."""
    try:
        import torch
    except Exception as error:
        return Devices(error=one_line(error))
    from workers.device_probe import probe

    found = probe()
    devices = [torch.device("cpu"), *(torch.device("cuda", gpu) for gpu in range(found.cuda))]
    try:
        gpus = [_gpu(device) for device in devices[1:]]
    except RuntimeError as error:
        gpus = []
        devices = devices[:1]
        problem = one_line(error, RuntimeError)
    else:
        problem = found.gpu_problem
    return Devices(
        torch=f"{torch.__version__} ({_build()})",
        gpus=gpus,
        gpu_problem=problem,
        dtypes=list(found.cpu_dtypes),
        ops=_ops(devices),
    )


def _gpu(device: "torch.device") -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    capability = architecture if torch.version.hip else f"{properties.major}.{properties.minor}"
    return Gpu(properties.name, total, free, capability)


def _build() -> str:
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda is not None else "CPU"


def _ops(devices: "list[torch.device]") -> dict[str, str]:
    """By device; GPUs of one name share an entry."""
    import torch

    from atom_ops import backend

    made: dict[str, str] = {}
    for device in devices:
        name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
        if name in made:
            continue
        try:
            made[name] = backend.summary(backend.resolve(device))
        except Exception as error:
            made[name] = f"none: {one_line(error)}"
    return made


if __name__ == "__main__":
    main()
