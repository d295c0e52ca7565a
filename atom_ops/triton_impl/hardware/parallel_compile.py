"""Compiles Triton kernels on several threads, before anything has to wait for one.

Triton compiles a kernel when it is first launched, one after the other, and a model has 30 to 80 that take
about half a second each.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs

from atom.shared.utils.logger import get_logger

_MOST_THREADS = 16


class KernelNotLoadedError(Exception):
    """A kernel was to be launched that this process has neither compiled nor loaded."""


@contextlib.contextmanager
def loaded_kernels_only() -> Iterator[None]:
    """Launches of other kernels raise KernelNotLoadedError."""

    def refuse(*, fn: Any, **_: object) -> bool:
        raise KernelNotLoadedError(fn.name)

    previous = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = previous


def compile_launched(device: torch.device, launch: Callable[[], None]) -> int:
    """Compile the kernels that `launch` launches; returns how many were in no cache.

    Those that were not loaded yet are not launched. So `launch` must be a capture that is never replayed.
    """
    kernels = _launched(launch)
    compiled: list[str] = []

    def on_compiled(*, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    previous = knobs.compilation.listener
    knobs.compilation.listener = on_compiled
    try:
        with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
            futures = [pool.submit(kernel.preload, data) for kernel, data in kernels]
    finally:
        knobs.compilation.listener = previous
    for future in futures:
        if (error := future.exception()) is not None:
            get_logger().warning("a kernel is compiled when it is first launched: %s", error)
    return len(compiled)


def _launched(launch: Callable[[], None]) -> list[tuple[Any, str]]:
    """The kernels that were not loaded, each with the specialization to compile; none of them is launched."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}

    def drop(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        kernel = fn.jit_function
        found[id(kernel), key] = kernel, compile["specialization_data"]
        return True

    previous = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = drop
    try:
        launch()
    finally:
        knobs.runtime.jit_cache_hook = previous
    return list(found.values())
