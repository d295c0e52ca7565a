"""Which providers run each op on one device; resolved once, when a worker starts."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from atom_ops import aiter_impl, native_impl, triton_impl
from atom_ops.attention_backend import ATTENTION_BACKENDS, use_attention_backends
from atom_ops.op import REFERENCE, REGISTRY
from atom_ops.ops.linear.linear import BATCH_INVARIANT, linear
from atom_ops.triton_impl.hardware import target
from atom_ops.weights import Weight

T = TypeVar("T")

_DEFAULT_ORDER = {
    "cpu": ("native", "onednn_packed", "cpu_int4", "cpu_int8", "sdpa_cpu"),
    "cuda": ("aiter", "triton", "blas"),
}


def resolve(
    device: torch.device,
    order: Sequence[str] | None = None,
    batch_invariant: bool = False,
    preferred: Sequence[str] = (),
    separated: Collection[str] = (),
    without_attention: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Set every op's providers and the attention backends for `device`.

    Returns op name -> provider names, in order of preference.

    `order` None: the default order of the device. The reference, `torch`, is always last. Raises
    ValueError for an explicit name that nothing has or that cannot run on `device`.

    `preferred` providers come before the default order, where they can run.

    Composed ops in `separated` have no provider but the reference, which calls their parts. Attention
    backends in `without_attention` are not used.

    `batch_invariant` allows only providers whose rows do not depend on the batch and prefers the
    batch-invariant GEMM; raises ValueError where there is none. Attention is batch-invariant by its
    plan (`BATCH_INVARIANT_SPLIT`). On a CPU this also tunes malloc to reuse freed memory.
    """
    if target.runs_on(device):
        triton_impl.load()
    if aiter_impl.runs_on(device):
        aiter_impl.load()
    if native_impl.runs_on(device):
        native_impl.load()
    names = (*preferred, *_DEFAULT_ORDER.get(device.type, ())) if order is None else tuple(order)
    if order is not None:
        _require(names, device)
    if batch_invariant:
        _require_batch_invariant(device)
        names = (BATCH_INVARIANT, *names)
    if device.type == "cpu":
        _reuse_freed_memory()
    for each in REGISTRY.values():
        used = () if each.name in separated else names
        known = (each.providers[name] for name in used if name in each.providers)
        allowed = (provider for provider in known if provider.batch_invariant or not batch_invariant)
        each.use([provider.name for provider in allowed if provider.supported(device)])
    layouts = [name for name in names if name not in without_attention]
    use_attention_backends(layouts, device, batch_invariant)
    return {name: each.order for name, each in sorted(REGISTRY.items())}


def tune(
    device: torch.device,
    weights: Iterable[Weight],
    cache_dir: Path,
    progress: Callable[[str, int, int], None],
) -> None:
    """Measure the fastest GEMM plans for those of these weights whose shapes have none yet.

    Call after `resolve`, once the weights are loaded. Does nothing unless `linear` uses the
    provider with plans. Results are stored in `cache_dir` for all workers of this machine.
    `progress` is called with (phase, done, total).
    """
    if device.type == "cuda" and "triton" in REGISTRY["linear"].order:
        from atom_ops.triton_impl.plans.bench import tune_linear

        tune_linear(device, weights, cache_dir, progress)


def compiles_ahead(device: torch.device) -> bool:
    """Whether `compile_launched` is for this device: an NVIDIA GPU with Triton's kernels."""
    return device.type == "cuda" and torch.version.hip is None and target.runs_on(device)


def compile_launched(device: torch.device, launch: Callable[[], None]) -> int:
    """Compile the Triton kernels that a capture launches; returns how many were in no cache.

    The capture must not be replayed: kernels may be missing.
    """
    from atom_ops.triton_impl.hardware.parallel_compile import compile_launched as compile_on_threads

    return compile_on_threads(device, launch)


def with_loaded_kernels(launch: Callable[[], T]) -> T | None:
    """What `launch` returns; None, when it would launch a Triton kernel that must be loaded first."""
    from atom_ops.triton_impl.hardware.parallel_compile import KernelNotLoadedError, loaded_kernels_only

    try:
        with loaded_kernels_only():
            return launch()
    except KernelNotLoadedError:
        return None


def summary(resolved: dict[str, tuple[str, ...]]) -> str:
    """What `resolve` returned as one line for the log; leaves out ops that only torch runs."""
    special = [f"{name}: {' > '.join(order)}" for name, order in resolved.items() if order != (REFERENCE,)]
    return "; ".join([*special, f"every other op: {REFERENCE}"])


def warnings(device: torch.device) -> list[str]:
    """Libraries that are installed for this device and cannot be used, each with what to do."""
    problems = {"AITER": aiter_impl.problem(device), "kernels in C++": native_impl.problem(device)}
    return [f"ops run without {name}: {problem}" for name, problem in problems.items() if problem is not None]


def ran_in_torch() -> list[str]:
    """Names of the ops that fell back to torch at least once since the last `resolve`."""
    return sorted(each.name for each in REGISTRY.values() if each.ran_reference)


def _require(names: tuple[str, ...], device: torch.device) -> None:
    for name in names:
        holders = [each for each in REGISTRY.values() if name in each.providers]
        attention = ATTENTION_BACKENDS.get(name)
        if not holders and attention is None:
            known = {known for each in REGISTRY.values() for known in each.providers}
            all_names = ", ".join(sorted(known | set(ATTENTION_BACKENDS)))
            raise ValueError(f"no op has a provider {name!r}; there are: {all_names}")
        if attention is not None and not attention.supported(device):
            raise ValueError(f"attention backend {name!r} cannot run on {device}: it needs {attention.needs}")
        for each in holders:
            provider = each.providers[name]
            if name != REFERENCE and not provider.supported(device):
                raise ValueError(
                    f"provider {name!r} of op {each.name} cannot run on {device}: it needs {provider.needs}"
                )


def _require_batch_invariant(device: torch.device) -> None:
    provider = linear.providers.get(BATCH_INVARIANT)
    if provider is None or not provider.supported(device):
        raise ValueError(f"no batch-invariant kernels on {device}: they need a GPU and triton")


# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_REUSED_BYTES = 256 << 20


def _reuse_freed_memory() -> None:
    """Have glibc keep up to `_REUSED_BYTES` of freed memory instead of returning it to the system.

    Otherwise the pages of every op's results are mapped and cleared again: attention over 64
    contexts of 256 tokens takes four times as long. Steps whose tensors are larger compute for so
    long that clearing pages does not count. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _REUSED_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
