"""The kernel of the fused all-reduce, in Triton's interpreter: ranks are processes with shared memory."""

from multiprocessing.process import BaseProcess

import pytest
import torch
from torch import multiprocessing

from atom_ops import add_rms_norm
from atom_ops.triton_impl.hardware import target

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
WIDTH, ROWS, EPS = 136, 6, 1e-5
CALLS = (5, 1, 8, 6)
"""Rows of one call after another; 8 are more than the inboxes have."""


def partial_rows(call: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    rows = torch.randn(CALLS[call], WIDTH, generator=generator).to(dtype)
    if call == 0:
        # The bits that mean "empty": a NaN like any other to its reader.
        rows[0, rank] = torch.full((1,), -1, dtype=torch.int16 if dtype.itemsize == 2 else torch.int32).view(
            dtype
        )
    return rows


def run_rank(
    rank: int, inboxes_N: torch.Tensor, results_NCRD: torch.Tensor, dtype: torch.dtype, two_shots: bool
) -> None:
    from atom_ops.triton_impl.elementwise.all_reduce import Inboxes, all_reduce_rows

    torch.set_num_threads(1)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes_N])
    inboxes = Inboxes(rank, addresses, ROWS * WIDTH, torch.zeros(ROWS, dtype=torch.int32))
    for call, rows in enumerate(CALLS):
        x, residual = partial_rows(call, rank, dtype), partial_rows(call, 50, dtype)
        if call == len(CALLS) - 1:
            both = all_reduce_rows(x, None, None, 0.0, inboxes, two_shots)
        else:
            both = all_reduce_rows(
                x, residual, torch.arange(WIDTH).to(dtype) / WIDTH, EPS, inboxes, two_shots
            )
        for at, found in enumerate(both):
            results_NCRD[rank, 2 * call + at, :rows] = found.float()


def expected(call: int, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.stack([partial_rows(call, rank, dtype).float() for rank in range(ranks)]).sum(0)
    if call == len(CALLS) - 1:
        return total.to(dtype), total.to(dtype)
    total = (total + partial_rows(call, 50, dtype).float()).to(dtype)
    weight = torch.arange(WIDTH).to(dtype) / WIDTH
    return add_rms_norm.reference(total, torch.zeros_like(total), weight, EPS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("ranks", "two_shots", "dtype"),
    [(2, False, torch.float32), (3, True, torch.float32), (3, False, torch.float16)],
    ids=["2-one-shot", "3-two-shots", "3-one-shot-float16"],
)
def test_triton_all_reduce_of_processes(ranks: int, two_shots: bool, dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    inboxes = torch.full((ranks, 2 * ranks * ROWS * WIDTH), -1, dtype=bits).share_memory_()
    results = torch.zeros(ranks, 2 * len(CALLS), max(CALLS), WIDTH).share_memory_()
    context = multiprocessing.get_context("fork")
    started: list[BaseProcess] = [
        context.Process(target=run_rank, args=(rank, inboxes, results, dtype, two_shots))
        for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(40)
        assert [process.exitcode for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    shown = results.nan_to_num(1e30)
    assert torch.equal(shown, shown[:1].expand_as(shown)), "the same bits on every rank"
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    for call, rows in enumerate(CALLS):
        for at, wanted in enumerate(expected(call, ranks, dtype)):
            for rank in range(ranks):
                found = results[rank, 2 * call + at, :rows]
                torch.testing.assert_close(
                    found, wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True
                )
    assert (inboxes == -1).all(), "every place is empty again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_rows_that_were_sent(dtype: torch.dtype) -> None:
    from atom_ops.triton_impl.experts.received_rows import add_received_rows

    x, received, residual = (partial_rows(2, rank, dtype) for rank in (0, 1, 50))
    weight, arrival = torch.arange(WIDTH).to(dtype) / WIDTH, torch.tensor([1, 0], dtype=torch.int32)
    found = add_received_rows(x, received, (arrival[:1], arrival[1:]), residual, weight, EPS)
    assert arrival.tolist() == [0, 0]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    for one, wanted in zip(found, expected(2, 2, dtype), strict=True):
        torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)
