"""Log probabilities, against float64 and a stable sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_ops import SamplingBatch, sample, token_logprobs
from atom_ops.ops.sampling import logprobs


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 6),
    vocabulary=st.integers(1, 300),
    top=st.integers(0, 25),
    levels=st.sampled_from([1, 4, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_values_order_and_ranks(
    tokens: int, vocabulary: int, top: int, levels: int, dtype: torch.dtype, seed: int
) -> None:
    """Few levels make many equal logits, zeros of both signs among them."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(0, 2, (tokens, vocabulary)) * levels / 4) * (4 / levels)
    rounded = torch.from_numpy(logits.astype(np.float32)).to(dtype)
    ids = random.integers(0, vocabulary, tokens)
    found = token_logprobs(rounded, torch.from_numpy(ids), top)
    exact = rounded.double().numpy()
    width = 1 + min(top, vocabulary)
    assert found.ids_NW.shape == found.values_NW.shape == (tokens, width)
    for row in range(tokens):
        best = np.lexsort((np.arange(vocabulary), -exact[row]))[: width - 1]
        assert found.ids_NW[row].tolist() == [ids[row], *best]
        assert found.ranks_N[row] == 1 + (exact[row] > exact[row, ids[row]]).sum()
    expected = rounded.double().log_softmax(-1).gather(1, found.ids_NW).float()
    torch.testing.assert_close(found.values_NW, expected, atol=2e-5, rtol=1e-5)


def greedy(rows: int) -> SamplingBatch:
    floats, ids = np.zeros(rows, np.float32), np.zeros(rows, np.int64)
    seeds = np.zeros(rows, np.uint64)
    return SamplingBatch.from_host(floats, ids, floats + 1, floats, seeds, ids, torch.device("cpu"))


def test_greedy_sampling_is_the_top_1_token() -> None:
    logits = torch.randint(0, 3, (20, 500)).to(torch.bfloat16)
    drawn = sample(logits, greedy(20), torch.arange(20))
    found = token_logprobs(logits, drawn, 1)
    assert torch.equal(found.ids_NW[:, 1], drawn) and (found.ranks_N == 1).all()


def test_slices_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = torch.randn(11, 300), torch.arange(11)
    whole = token_logprobs(logits, ids, 4)
    monkeypatch.setattr(logprobs, "_SLICE", 700)
    parts = token_logprobs(logits, ids, 4)
    assert torch.equal(whole.ids_NW, parts.ids_NW) and torch.equal(whole.ranks_N, parts.ranks_N)
    torch.testing.assert_close(whole.values_NW, parts.values_NW)


def test_masked_and_broken_logits() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 1.0, 2.0], [-torch.inf] * 3])
    found = token_logprobs(logits, torch.tensor([1, 1, 1]), 3)
    assert found.values_NW[0].tolist() == [-torch.inf, *torch.tensor([0.5, 0.5]).log().tolist(), -torch.inf]
    assert found.ids_NW[0].tolist() == [1, 0, 2, 1]
    assert found.values_NW[1:].isnan().all()
    assert ((found.ids_NW >= 0) & (found.ids_NW < 3)).all()
