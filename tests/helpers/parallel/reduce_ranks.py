"""Checks run by two ranks: AITER's all-reduce, emulated, against torch's."""

import gc

import pytest
import torch
from torch import Tensor

from atom_ops import add_rms_norm, backend
from parallel import peer_memory
from parallel.aiter_memory import AiterMemory
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.aiter_contract import reduce
from tests.aiter_contract.package import Swap, install
from tests.helpers.parallel.signatures import in_development, published

WIDTH = 512
CPU = torch.device("cpu")


def check(mesh: Mesh) -> dict[str, int]:
    """Returns the comparisons and the swaps that were found. Raises AssertionError."""
    compared = 0
    for addresses in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            compared += _run(mesh, addresses, dtype, None)
    _check_broken(mesh)
    found = 0
    for addresses, swaps in reduce.SWAPS.items():
        for swap in swaps:
            try:
                _run(mesh, addresses, torch.float32, swap)
            except (AssertionError, AttributeError, TypeError, RuntimeError, ValueError, KeyError):
                found += 1
            else:
                raise AssertionError(f"{swap} changes nothing")
    # What the failed calls left refers to the process group, whose threads must end before the process.
    gc.collect()
    return {"compared": compared, "swaps": found}


def _check_broken(mesh: Mesh) -> None:
    """Where AITER cannot be used by one rank, all of them leave it."""
    with pytest.MonkeyPatch.context() as patch:
        kind = AiterMemory if mesh.tp.rank == 0 else None
        patch.setattr(peer_memory, "_kind", lambda *_: kind)
        comm = Communicator(mesh.tp.rank, mesh.tp.size, mesh.tp._group)
        comm.open_peers(WIDTH, torch.float32, CPU)
        assert comm._peers is None
        assert torch.equal(comm.all_reduce(torch.ones(1, WIDTH)), torch.full((1, WIDTH), 2.0))


def _run(mesh: Mesh, addresses: bool, dtype: torch.dtype, swap: Swap | None) -> int:
    group = mesh.tp._group
    signatures = published() | in_development() if addresses else published()
    with pytest.MonkeyPatch.context() as patch:
        calls = install(patch, signatures, swap, group=group)
        patch.setattr(peer_memory, "_reach_each_other", lambda group, device: True)
        backend.resolve(CPU)
        comm = Communicator(mesh.tp.rank, mesh.tp.size, group)
        comm.open_peers(WIDTH, dtype, CPU)
        compared = sum(_compare(comm, tokens, dtype, group, addresses) for tokens in (1, 7))
        # Too long, or of another kind: torch's.
        assert comm._peers is not None and not comm._peers.fits(torch.empty(0, WIDTH, dtype=dtype))
        assert not comm._peers.fits(torch.empty(1, dtype=dtype).expand(70_000, WIDTH))
        assert not comm._peers.fits(torch.empty(3, WIDTH // 2, dtype=dtype))
        names = {"aiter.all_reduce", "aiter.init_custom_ar"}
        assert set(calls) >= names | ({"aiter.fused_allreduce_rmsnorm"} if addresses else set())
    backend.resolve(CPU)
    return compared


def _compare(comm: Communicator, tokens: int, dtype: torch.dtype, group: object, addresses: bool) -> int:
    generator = torch.Generator().manual_seed(tokens)

    def rows() -> Tensor:
        return torch.randn(tokens, WIDTH, generator=generator).to(dtype)

    parts, residual, weight = [rows(), rows()], rows(), rows()[0]
    wanted = (parts[0].float() + parts[1].float()).to(dtype)
    found = comm.all_reduce(parts[comm.rank].clone())
    assert torch.equal(found, wanted)
    fused = comm.fuses_norm(found)
    assert fused == addresses
    close = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for each in (weight, weight.float() * 3):  # zero-centred norms have float32 weights
        normed, total = comm.all_reduce_add_rms_norm(parts[comm.rank].clone(), residual, each, 1e-1)
        for one, other in zip((normed, total), add_rms_norm(wanted, residual, each, 1e-1), strict=True):
            torch.testing.assert_close(one, other, **close)
    return 3
