"""Compiles a model's forward pass, with the compiled code on disk for the next start.

    ATOM_CACHE_DIR/compiled/KEY    KEY: of the model, the configuration, the device and the versions

torch writes each file under another name and moves it into place, so that several processes may share a
directory. One whose content cannot be used is deleted, and the model is compiled again.
"""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS
from atom.shared.config.engine import EngineConfig
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import get_logger
from atom.shared.utils.trusted_path import REMEDY, distrusted
from atom.shared.utils.version import atom_version
from workers.graphs.compiled_model import CompiledForward, Step
from workers.layers.causal_lm import CausalLM

_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def directory_of(cache_dir: Path, config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> Path:
    """The directory of this model's compiled code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    parts = (
        checkpoint.hf_config,
        config.model.dtype,
        config.device.level,
        config.cache.kv_cache_dtype,
        (atom_version(), str(torch.__version__), name),
    )
    key = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
    return cache_dir / "compiled" / key[:16]


def compile_forward(model: CausalLM, step: Step, level: int, directory: Path) -> CompiledForward:
    """The compiled forward pass of a level in `COMPILERS`.

    Raises ValueError where a compiler is missing, or for a model that cannot be traced.
    """
    if COMPILERS[level] != "inductor":
        return CompiledForward(model, step, level)
    check_compiler(next(model.buffers()).device)
    _use(directory)
    try:
        return CompiledForward(model, step, level)
    except (torch.OutOfMemoryError, ValueError):
        raise
    except Exception as error:  # whatever a damaged file leads to
        if not directory.exists():
            raise
        get_logger().warning(
            "compiling again, without what is in %s: %s", directory, one_line(error, ValueError)
        )
    shutil.rmtree(directory, ignore_errors=True)
    torch.compiler.reset()
    return CompiledForward(model, step, level)


def check_compiler(device: torch.device) -> None:
    """Raise ValueError unless Inductor can compile for the device."""
    if device.type == "cuda":
        return  # by Triton, as our own kernels
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        raise ValueError(
            "--level 2 on a CPU needs a C++ compiler: install g++, or name another in CXX; or use --level 3"
        ) from None


def _use(directory: Path) -> None:
    """Have Inductor keep its files in `directory`, unless the user's variable names another one."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its default when it is imported.
    if os.environ.get(_DIRECTORY, "") in ("", os.path.abspath(default_cache_dir())):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if problem := distrusted(directory):
            raise ValueError(f"--level 2 loads compiled code from {directory}, but {problem}: {REMEDY}")
        os.environ[_DIRECTORY] = str(directory)
    if not os.environ.get(_THREADS):
        inductor.compile_threads = 1  # in this process: a pool of processes would stay
