"""Memory of the kernels that torch and oneDNN cache on a CPU."""

import os
import subprocess
import sys
import textwrap

import pytest

DEADLINE_S = 300


def run(script: str) -> str:
    """Output of a new process whose environment sets no cache sizes."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.timeout(DEADLINE_S)
def test_steps_of_new_sizes_need_no_new_memory() -> None:
    """Counts the bytes that malloc has handed out, which do not depend on what it returns to the system."""
    script = """
        import ctypes
        from atom.shared.config.device import DeviceConfig
        from atom.shared.config.engine import EngineConfig
        from workers.main import _set_kernel_cache_environment

        _set_kernel_cache_environment(EngineConfig(device=DeviceConfig(device="cpu")))

        import torch
        from atom_ops import backend
        from atom_ops.ops.linear.linear import linear, pack_linear_weight

        class Mallinfo(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in (
                "arena", "ordblks", "smblks", "hblks", "hblkhd",
                "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
            )]

        library = ctypes.CDLL(None)
        if not hasattr(library, "mallinfo2"):
            print("no mallinfo2")
            raise SystemExit
        library.mallinfo2.restype = Mallinfo

        torch.set_num_threads(1)
        backend.resolve(torch.device("cpu"))
        weights = [pack_linear_weight(torch.zeros(outputs, 64)) for outputs in (64, 80, 96, 112)]
        used = []
        with torch.inference_mode():
            for sizes in (range(1, 101), range(101, 201)):
                before = library.mallinfo2().uordblks
                for tokens in sizes:
                    for weight in weights:
                        linear(torch.zeros(tokens, 64), weight)
                used.append(library.mallinfo2().uordblks - before)
        print(*used, flush=True)
    """
    found = run(script)
    if found.startswith("no mallinfo2"):
        pytest.skip("glibc alone counts what malloc has handed out")
    first, second = map(int, found.split())
    assert second < first / 3, found
