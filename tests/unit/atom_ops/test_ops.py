"""Every op x provider x dtype x case of the op's own table."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.op import REFERENCE, REGISTRY, Case, Op, Provider

CPU = torch.device("cpu")
WRITERS = ("write_kv", "record_drawn")
"""Ops that change their arguments."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _pairs() -> Iterator[Any]:
    for op in REGISTRY.values():
        for provider in op.providers.values():
            for dtype in DTYPES:
                for case in op.cases:
                    # The reference in float32 is what everything else is measured by.
                    if provider.name != REFERENCE or dtype != torch.float32:
                        label = f"{op.name}-{provider.name}-{str(dtype)[6:]}-{case.label}"
                        yield pytest.param(op, provider, dtype, case, id=label)


def _arguments(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    return case.make(dtype, torch.Generator().manual_seed(3))


def _in_float32(value: Any) -> Any:
    """The same numbers with more digits; a float8 cache stays what it is."""
    if isinstance(value, torch.Tensor):
        wider = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if wider else value
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _in_float32(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


@pytest.mark.parametrize(("op", "provider", "dtype", "case"), list(_pairs()))
def test_agrees_with_reference(op: Op[..., Any], provider: Provider, dtype: torch.dtype, case: Case) -> None:
    """Results, and arguments that the op writes to."""
    if not provider.supported(CPU):
        pytest.skip(f"needs {provider.needs}")
    backend.resolve(CPU)
    given = _arguments(case, dtype)
    mine = provider.prepare(*given) if provider.prepare else given
    if provider.supports and not provider.supports(*mine):
        pytest.skip(f"{provider.name} does not take {dtype} here")
    found = provider.function(*mine)
    reference = _in_float32(_arguments(case, dtype))
    wanted = op.reference(*reference)
    if op.name in WRITERS:
        found, wanted = (found, *mine), (wanted, *reference)
    tolerance = op.tolerances[dtype]
    pairs = list(zip(_tensors(found), _tensors(wanted), strict=True))
    assert pairs
    for mine_tensor, wanted_tensor in pairs:
        torch.testing.assert_close(
            mine_tensor.float(), wanted_tensor.float(),
            atol=tolerance.absolute, rtol=tolerance.relative,
        )  # fmt: skip


def test_every_public_op_is_in_the_table() -> None:
    public = {name for name in atom_ops.__all__ if isinstance(getattr(atom_ops, name), Op)}
    assert public | {"masked_attention"} == set(REGISTRY)
    assert all(op.cases and op.__doc__ for op in REGISTRY.values())
