"""One op's test table, run against its reference on any device."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atom_ops import aiter_impl, native_impl, triton_impl
from atom_ops.op import REFERENCE, REGISTRY, Case, Op, Provider
from atom_ops.triton_impl.hardware import target

CPU = torch.device("cpu")
WRITERS = (
    *("write_kv", "rotate_and_write_kv", "attend_projection", "record_sampled", "apply_token_bitmask"),
    *("write_latent", "norm_and_write_latents", "write_index_keys", "causal_conv", "gated_delta_rule"),
    *("kimi_delta_attention", "write_rows", "write_normed_rows", "compress_rows"),
    *(
        "verify_drafts",
        "propose_ngrams",
        "record_outputs",
        "propose_suffixes",
        "select_slots",
        "latent_queries",
    ),
    *("gather_block_rows", "scatter_block_rows"),
)
"""Ops that change their arguments."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def table(device: torch.device) -> Iterator[Any]:
    """Op, provider, dtype and case, for every provider that runs on `device`."""
    if target.runs_on(device):
        triton_impl.load()
    if aiter_impl.runs_on(device):
        aiter_impl.load()
    if native_impl.runs_on(device):
        native_impl.load()
    for op in REGISTRY.values():
        for provider in op.providers.values():
            if not provider.supported(device):
                continue
            for dtype in DTYPES:
                if provider.name == REFERENCE and (device, dtype) == (CPU, torch.float32):
                    continue  # the reference of the others
                for case in op.cases:
                    if _interpreted(provider, device) and not _interpretable(op, provider, dtype, case):
                        continue
                    label = f"{op.name}-{provider.name}-{str(dtype)[6:]}-{case.label}"
                    yield pytest.param(op, provider, dtype, case, id=label)


def check(op: Op[..., Any], provider: Provider, dtype: torch.dtype, case: Case, device: torch.device) -> None:
    """Compare results and changed arguments with the reference in float32 on the CPU."""
    given = changed(_arguments(case, dtype), lambda tensor: tensor.to(device))
    mine = provider.prepare(*given) if provider.prepare else given
    if provider.supports and not provider.supports(*mine):
        pytest.skip(f"{provider.name} does not take {dtype} here")
    found = provider.function(*mine)
    reference = changed(_arguments(case, dtype), _wider)
    wanted = op.reference(*reference)
    if op.name in WRITERS:
        found, wanted = (found, *mine), (wanted, *reference)
    tolerance = op.tolerance(provider, case, dtype)
    pairs = list(zip(_tensors(found), _tensors(wanted), strict=True))
    assert pairs
    for mine_tensor, wanted_tensor in pairs:
        torch.testing.assert_close(
            mine_tensor.float().cpu(), wanted_tensor.float(),
            atol=tolerance.absolute, rtol=tolerance.relative,
        )  # fmt: skip


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(changed(part, change) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: changed(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _interpreted(provider: Provider, device: torch.device) -> bool:
    return device == CPU and provider.function.__module__.startswith(triton_impl.__name__)


def _interpretable(op: Op[..., Any], provider: Provider, dtype: torch.dtype, case: Case) -> bool:
    """Triton's interpreter multiplies bfloat16 matrices wrongly, and loses carries rounding to float8."""
    rounds = op.name in WRITERS or provider.quantizes_activations
    return dtype != torch.bfloat16 and not (rounds and case.label.endswith("fp8"))


def _arguments(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    return case.make(dtype, torch.Generator().manual_seed(3))


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """The value in float32; a float8 cache is not changed."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
