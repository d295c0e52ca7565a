"""Kernels are collected while they are launched, and compiled afterwards; here by stand-ins for Triton's."""

import importlib
import pkgutil
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from atom_ops import triton_impl
from atom_ops.triton_impl.hardware import target
from atom_ops.triton_impl.hardware.parallel_compile import (
    KernelNotLoadedError,
    compile_launched,
    loaded_kernels_only,
)

CPU = torch.device("cpu")


class Kernel:
    """A kernel that is not compiled: asks Triton's hook at each launch, as Triton does."""

    def __init__(self, name: str, is_cached: bool = False, error: Exception | None = None):
        self.name = name
        self.launches = 0
        self.compiled_by: list[int] = []
        self._is_cached = is_cached
        self._error = error

    def launch(self, key: str) -> None:
        hook: Any = knobs.runtime.jit_cache_hook
        data = {"specialization_data": f"{self.name} {key}"}
        info = SimpleNamespace(jit_function=self, name=self.name)
        if not hook(key=key, fn=info, compile=data, repr="", is_manual_warmup=False, already_compiled=False):
            self.launches += 1

    def preload(self, data: str) -> None:
        self.compiled_by.append(threading.get_ident())
        assert knobs.runtime.jit_cache_hook is None, "it would drop what is to be compiled"
        if self._error is not None:
            raise self._error
        listener: Any = knobs.compilation.listener
        listener(src=None, metadata={"name": self.name}, times=None, cache_hit=self._is_cached)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_each_specialization_is_compiled_once_by_another_thread_and_not_launched() -> None:
    kernels = [Kernel("a"), Kernel("b"), Kernel("c", is_cached=True)]

    def launch() -> None:
        for kernel in kernels * 2:
            kernel.launch("one")
        kernels[0].launch("two")

    assert compile_launched(CPU, launch) == 3, "two of a, and b; c was in Triton's cache"
    assert [len(kernel.compiled_by) for kernel in kernels] == [2, 1, 1]
    assert not any(kernel.launches for kernel in kernels)
    assert threading.get_ident() not in kernels[0].compiled_by
    assert knobs.runtime.jit_cache_hook is None and knobs.compilation.listener is None


def test_what_fails_is_told_and_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr("atom_ops.triton_impl.hardware.parallel_compile.get_logger", lambda: log)
    kernels = [Kernel("bad", error=ValueError("no such layout")), Kernel("good")]

    def launch() -> None:
        for kernel in kernels:
            kernel.launch("k")

    assert compile_launched(CPU, launch) == 1
    assert len(lines) == 1 and "no such layout" in lines[0]


def test_an_error_while_launching_restores_the_hooks() -> None:
    def launch() -> None:
        raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="captured"):
        compile_launched(CPU, launch)
    assert knobs.runtime.jit_cache_hook is None and knobs.compilation.listener is None


def test_a_kernel_that_is_not_loaded_is_refused() -> None:
    kernel = Kernel("a")
    with pytest.raises(KernelNotLoadedError, match="a"), loaded_kernels_only():
        kernel.launch("one")
    assert not kernel.launches and knobs.runtime.jit_cache_hook is None


@pytest.mark.skipif(target.INTERPRETED, reason="needs Triton's compiler")
def test_later_processes_find_what_one_has_compiled() -> None:
    """Constants of a kernel and of what it calls differ in value only if they differ in name.

    Triton's key has them sorted by name, and those of one name by the address of their module.
    """
    modules = pkgutil.walk_packages(triton_impl.__path__, f"{triton_impl.__name__}.")
    members = [value for each in modules for value in vars(importlib.import_module(each.name)).values()]
    kernels = [value for value in members if isinstance(value, JITFunction)]
    assert len(kernels) > 300
    for kernel in kernels:
        assert kernel.cache_key  # collects the constants
        values: dict[str, str] = {}
        for (name, _), (value, _) in kernel.used_global_vals.items():
            if isinstance(value, constexpr):
                assert values.setdefault(name, str(value)) == str(value), f"{kernel.__name__}: {name}"
