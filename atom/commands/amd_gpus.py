"""`python -m atom.commands.amd_gpus`: AMD GPUs as the driver knows them, by AMD's library `amdsmi`.

Prints an `AmdGpus` as the last line on standard output. The library ignores HIP_VISIBLE_DEVICES, so that it
also shows the GPUs that torch is not to use; it is imported in this process alone, since it may crash.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from atom.commands.host import link_lines
from atom.shared.messages.doctor import AmdGpu, AmdGpus, AmdLaunch
from atom.shared.utils.errors import one_line
from atom.shared.utils.process import read_launch

_LINK = "AMDSMI_LINK_TYPE_"


def main() -> None:
    read_launch(AmdLaunch)
    sys.stdout.write("\n" + msgspec.json.encode(describe()).decode() + "\n")


def describe() -> AmdGpus:
    """All GPUs of the driver; an error in one line if the library cannot tell."""
    try:
        import amdsmi
    except ModuleNotFoundError as error:
        missing = error.name == "amdsmi"
        return AmdGpus(error="amdsmi is not installed" if missing else one_line(error))
    except BaseException as error:  # without ROCm's libraries it raises, or exits
        return AmdGpus(error=one_line(error))
    try:
        amdsmi.amdsmi_init()
        try:
            return _found()
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception as error:
        return AmdGpus(error=one_line(error))


def _found() -> AmdGpus:
    import amdsmi

    handles = amdsmi.amdsmi_get_processor_handles()
    drivers = [amdsmi.amdsmi_get_gpu_driver_info(processor_handle=handle) for handle in handles[:1]]
    has_rocm, rocm = amdsmi.amdsmi_get_rocm_version()
    return AmdGpus(
        gpus=[_gpu(handle) for handle in handles],
        driver=" ".join(f"{each['driver_name']} {each['driver_version']}" for each in drivers),
        rocm=rocm if has_rocm else "",
        links=link_lines(_links(handles)),
    )


def _gpu(handle: Any) -> AmdGpu:
    import amdsmi

    chip = amdsmi.amdsmi_get_gpu_asic_info(processor_handle=handle)
    memory = amdsmi.amdsmi_get_gpu_vram_usage(processor_handle=handle)  # in MiB
    total = memory["vram_total"]
    used = memory["vram_used"]
    return AmdGpu(chip["market_name"], chip["target_graphics_version"], total << 20, (total - used) << 20)


def _links(handles: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Kind of link, and the two GPUs."""
    import amdsmi

    # The numbers of the kinds differ between releases.
    kinds = {each.value: each.name.removeprefix(_LINK) for each in amdsmi.AmdSmiLinkType}
    for first, one in enumerate(handles):
        for second, other in enumerate(handles[first + 1 :], first + 1):
            link = amdsmi.amdsmi_topo_get_link_type(processor_handle_src=one, processor_handle_dst=other)
            yield kinds.get(link["type"], "UNKNOWN"), first, second


if __name__ == "__main__":
    main()
