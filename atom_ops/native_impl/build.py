"""Compiles `kernels.cpp` for this host, once, and loads the library.

    ATOM_CACHE_DIR/native/KEY.so    KEY: of the sources, the compiler's command and the host's instructions

The library uses the OpenMP of the process, which is torch's. A file that is not as it was written is
compiled again, so that no process loads half a library.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from atom.shared.utils import envs
from atom.shared.utils.compiler import COMPILERS, find_compiler
from atom.shared.utils.errors import disk_full
from atom.shared.utils.file_lock import exclusive
from atom.shared.utils.logger import get_logger
from atom.shared.utils.trusted_path import REMEDY, distrusted
from atom_ops.native_impl import compilers

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = tuple(sorted(_SOURCE.parent.glob("*.h")))
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    "-fno-strict-aliasing",  # the same memory is read as values, pairs and vectors
    *("-fopenmp", "-fPIC"),
)
DTYPES = ("float32", "bfloat16")
"""dtypes of the kernels' values; the kernels are compiled once for each."""
_VERSION_DEADLINE_S = 180.0
_CPU_S = 300
"""Processor time that a compiler may use, in seconds: ten times what it takes."""
_DEADLINE_S = 1800.0
"""Most seconds that a start waits for the kernels: other programs may use the same cores."""


class BuildError(Exception):
    """The library cannot be built or loaded here; says why and what to do."""


def library() -> ctypes.CDLL:
    """The kernels. Raises BuildError, each time the same; OSError when the disk of the cache is full."""
    found = _library()
    if isinstance(found, BuildError):
        raise found
    return found


@cache
def _library() -> ctypes.CDLL | BuildError:
    try:
        return _opened()
    except BuildError as error:
        return error
    except compilers.CompilerError as error:
        if disk_full(error):
            raise OSError(errno.ENOSPC, f"the kernels cannot be compiled: {error}") from None
        return BuildError(str(error))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if disk_full(error):
            raise
        return BuildError(f"the kernels cannot be compiled: {error}")


def _opened() -> ctypes.CDLL:
    compiler = _compiler()
    key = hashlib.sha256(b"\0".join([*_sources(), *_host(compiler)])).hexdigest()[:32]
    directory = _directory()
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="atom-native-") as scratch:
            return _loaded(_built(compiler, Path(scratch) / f"{key}.so"))
    path = directory / f"{key}.so"
    return _loaded(path if _is_whole(path) else _built(compiler, path))


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from None
    for function in (library.atom_lanes, library.atom_has_tiles):
        function.argtypes = ()
        function.restype = ctypes.c_int64
    library.atom_run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.atom_run.restype = None
    return library


def _compiler() -> list[str]:
    """The command of a C++ compiler. Raises BuildError if there is none."""
    if found := find_compiler():
        return found
    tried = os.environ.get("CXX") or ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler ({tried}): install one, such as g++")


def _sources() -> list[bytes]:
    return [path.read_bytes() for path in (_SOURCE, *_HEADERS)]


def _host(compiler: list[str]) -> list[bytes]:
    """What the library depends on besides its source."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_VERSION_DEADLINE_S, check=False
    )
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    command = " ".join([*_FLAGS, *compiler])
    return [version.stdout, instructions.encode(), command.encode(), platform.machine().encode()]


def _directory() -> Path | None:
    """Where libraries are kept; None if it cannot be written, or if other users can write it."""
    directory = Path(envs.ATOM_CACHE_DIR) / "native"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if problem := distrusted(directory):
        get_logger().warning("kernels are compiled at each start: %s; %s", problem, REMEDY)
        return None
    return directory if os.access(directory, os.W_OK) else None


def _is_whole(path: Path) -> bool:
    if distrusted(path):
        return False
    try:
        return _digest(path) == path.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _built(compiler: list[str], path: Path) -> Path:
    """Compile to `path`, unless another process is doing so: then wait for it."""
    name = path.stem
    with _one_at_a_time(path):
        if _is_whole(path):
            return path
        for left in path.parent.glob(f"{name}-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        get_logger().info("compiling kernels for this CPU, once: half a minute to three minutes of two cores")
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=path.parent) as scratch:
            _compile(compiler, Path(scratch), path)
    return path


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """A process that waits too long, or where files cannot be locked, compiles as well."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive(path.with_suffix(".lock"), 2 * _DEADLINE_S, lambda: None))
        except OSError as error:  # a TimeoutError is one too
            get_logger().debug("kernels are compiled without a lock: %s", error)
        yield


def _compile(compiler: list[str], scratch: Path, path: Path) -> None:
    objects = [str(scratch / f"{dtype}.o") for dtype in DTYPES]
    made = scratch / "kernels.so"
    digest = scratch / "kernels.sha256"
    compiling = [
        [compiler[0], *_FLAGS, *compiler[1:], f"-DATOM_DTYPE={dtype}", "-c", str(_SOURCE), "-o", each]
        for dtype, each in zip(DTYPES, objects, strict=True)
    ]
    compilers.run(compiling, scratch, _DEADLINE_S, _CPU_S)
    linking = [*compiler, "-fopenmp", "-shared", *objects, "-o", str(made)]
    compilers.run([linking], scratch, _DEADLINE_S, _CPU_S)
    digest.write_text(_digest(made))
    made.replace(path)
    digest.replace(path.with_suffix(".sha256"))
