"""Sampling tokens by every provider, against the definition written with plain numpy."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from atom_ops import SamplingBatch, backend, sample
from atom_ops.ops.sampling import sampling
from atom_ops.ops.sampling.philox import exponential_, philox, store_words, token_words, uniform_
from atom_ops.triton_impl.hardware.target import INTERPRETED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Interpreted kernels compute with numpy, which warns of the intended infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass(frozen=True)
class Sampler:
    """`sample` by one provider on one device."""

    device: torch.device
    slow: bool

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        temperature: float | list[float] = 1.0,
        top_k: int | list[int] = 0,
        top_p: float | list[float] = 1.0,
        min_p: float | list[float] = 0.0,
        seed: int | NDArray[np.uint64] = 7,
        sequence: int = 0,
    ) -> Tensor:
        def column(value: object, dtype: type) -> NDArray[np.generic]:
            return np.broadcast_to(np.array(value, dtype), len(logits)).copy()

        batch = SamplingBatch.from_host(
            column(temperature, np.float32),
            column(top_k, np.int64),
            column(top_p, np.float32),
            column(min_p, np.float32),
            column(seed, np.uint64),
            column(sequence, np.int64),
            self.device,
        )
        return sample(logits.to(self.device), batch, positions.to(self.device)).cpu()


@pytest.fixture(
    scope="module",
    params=[("torch", CPU), ("triton", CPU), pytest.param(("triton", CUDA), marks=pytest.mark.gpu)],
    ids=["torch-cpu", "triton-cpu", "triton-gpu"],
)
def sampler(request: pytest.FixtureRequest) -> Iterator[Sampler]:
    name, device = request.param
    if device == CUDA and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    backend.resolve(device)
    if name not in sample.providers or not sample.providers[name].supported(device):
        pytest.skip(f"provider {name} does not run on {device} here")
    sample.use([name])
    yield Sampler(device, slow=name == "triton" and device == CPU)
    backend.resolve(CPU)


def kept_tokens(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Weights of the tokens that min-p, top-k and top-p keep, 0 for the others."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    weights = np.exp(scaled, dtype=np.float32).astype(np.float64)
    weights[weights < np.float32(min_p)] = 0
    order = np.lexsort((np.arange(len(weights)), -weights))
    if top_k:
        order = order[:top_k]
    share = weights[order].cumsum() / weights[order].sum()
    count = len(order)
    if top_p < 1:
        count = int(np.searchsorted(share, np.float64(np.float32(top_p)), side="left")) + 1
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    return kept


def noise(seed: int, sequence: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Exponential variates of all tokens, from the words in plain integers."""
    blocks = torch.arange(-(-vocabulary // 4))
    one = [torch.tensor([number]) for number in (int(np.uint64(seed).astype(np.int64)), sequence, position)]
    words = torch.stack([word[0] for word in token_words(*one, blocks, sampling.SAMPLE_TOKEN)], -1)
    uniforms = np.minimum(
        (words.flatten().numpy().astype(np.float32) + np.float32(0.5)) * np.float32(2**-32),
        np.float32(1 - 2**-24),
    )
    return -np.log1p(-uniforms[:vocabulary].astype(np.float64))


def near_best(kept: NDArray[np.float64], exponentials: NDArray[np.float64]) -> set[int]:
    """The tokens that may be sampled: those within float32 rounding of the best."""
    scores = kept / exponentials
    return set(np.flatnonzero(scores >= scores.max() * (1 - 1e-5)).tolist())


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    found = torch.stack(philox(torch.tensor(counter)[:, None], torch.tensor(key)[:, None]))
    assert found[:, 0].tolist() == words


def test_philox_columns_are_independent() -> None:
    counter, key = torch.randint(0, 2**32, (4, 9)), torch.randint(0, 2**32, (2, 9))
    for column in range(9):
        alone = philox(counter[:, column : column + 1], key[:, column : column + 1])
        assert torch.equal(torch.stack(philox(counter, key))[:, column], torch.stack(alone)[:, 0])


def test_words_depend_on_seed_sequence_position_purpose_and_token() -> None:
    seed, sequence, position, purpose, token = 0xFEDCBA9876543210, 5, 41, 3, 4 * 2**20 + 6
    words = philox(
        torch.tensor([[position], [purpose], [sequence], [token // 4]]),
        torch.tensor([[seed & 0xFFFFFFFF], [seed >> 32]]),
    )
    one = [torch.tensor([number]) for number in (seed - 2**64, sequence, position)]
    found = token_words(*one, torch.tensor([2**20, 2**20 + 1]), purpose)
    assert found[token % 4][0, 1].item() == words[token % 4].item()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_every_provider_has_the_words_of_needed_tokens(share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    columns = torch.randint(-(1 << 62), 1 << 62, (3, 4), generator=generator)
    needed_RW = torch.rand(4, 5_000, generator=generator) < share
    words = torch.stack(token_words(*columns, torch.arange(1_250), 3), -1).flatten(1).float()
    for provider in store_words.providers.values():
        if provider.supported(CPU):
            found_RW = provider.function(*columns, 3, needed_RW, torch.full((4, 5_000), torch.nan))
            assert torch.equal(found_RW[needed_RW], words[needed_RW]), provider.name
            assert found_RW.isfinite().all()


def test_uniforms_lie_strictly_between_0_and_1() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 2**8, 2**32 - 1]).float()
    uniforms = uniform_(words.clone())
    assert uniforms.tolist() == [2**-33, 1.5 * 2**-32, 0.5, 1 - 2**-24, 1 - 2**-24]
    exponentials = exponential_(words)
    assert exponentials.isfinite().all() and (exponentials > 0).all()


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(CPU, marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
        pytest.param(CUDA, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_triton_has_the_same_uniforms(device: torch.device) -> None:
    if device == CUDA and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from tests.helpers.kernels.noise_kernel import store_uniforms

    for seed, sequence, position in ((7, 0, 0), (-5, 3, 2**20), (2**62, 127, 8191)):
        one = [torch.tensor([number]) for number in (seed, sequence, position)]
        words = torch.stack([word[0] for word in token_words(*one, torch.arange(1024), 0)], -1).flatten()
        found = torch.empty(4096, device=device)
        store_uniforms[(1,)](*(number.to(device) for number in one), found)
        assert torch.equal(found.cpu(), uniform_(words.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_takes_the_smallest_of_equal_ids(sampler: Sampler, dtype: torch.dtype, rows: int) -> None:
    for vocabulary in (3, 100, 997, 151936):
        logits = torch.zeros(rows, vocabulary, dtype=dtype)
        ties = torch.randperm(vocabulary)[: max(2, vocabulary // 7)]
        logits[:, ties] = 3.5
        found = sampler(logits, torch.arange(rows), temperature=0.0)
        assert found.dtype == torch.int64
        assert found.tolist() == [ties.min().item()] * rows


LIMITS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 10**6]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)


@settings(max_examples=7 if INTERPRETED else 150, deadline=None)
@given(
    limits=st.lists(LIMITS, min_size=1, max_size=5),
    vocabulary=st.integers(1, 1200),
    levels=st.sampled_from([2, 6, 10**6]),
    seed=st.integers(0, 2**64 - 1),
)
def test_samples_follow_the_definition(
    sampler: Sampler, limits: list[dict[str, float]], vocabulary: int, levels: int, seed: int
) -> None:
    """Few levels make many equal logits."""
    generator = np.random.default_rng(seed)
    rows = len(limits)
    logits = generator.normal(0, 2, (rows, vocabulary)).astype(np.float32)
    logits = np.round(logits * levels / 10) * np.float32(10 / levels)
    positions = torch.from_numpy(generator.integers(0, 2**20, rows))
    columns = {name: [limit[name] for limit in limits] for name in limits[0]}
    found = sampler(torch.from_numpy(logits), positions, **columns, seed=seed)  # type: ignore[arg-type]
    for row, limit in enumerate(limits):
        kept = kept_tokens(logits[row], **limit)  # type: ignore[arg-type]
        exponentials = noise(seed, 0, int(positions[row]), vocabulary)
        assert kept[found[row]] > 0
        assert found[row].item() in near_best(kept, exponentials)


def test_top_k_ties_go_to_smaller_ids(sampler: Sampler) -> None:
    rows = 14 if sampler.slow else 400
    logits = torch.zeros(rows, 600)
    logits[:, 500] = 0.5
    sampled = sampler(logits, torch.arange(rows), top_k=4, temperature=2.0)
    assert set(sampled.tolist()) == {0, 1, 2, 500}


def test_top_p_keeps_the_shortest_prefix(sampler: Sampler) -> None:
    rows = 11 if sampler.slow else 500
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().repeat(rows, 1)
    marks = [(0.3, {0}), (0.41, {0, 2}), (0.69, {0, 2}), (0.71, {0, 2, 3}), (1e-9, {0})]
    for top_p, kept in marks[1::2] if sampler.slow else marks:
        sampled = sampler(logits, torch.arange(rows), top_p=top_p)
        assert set(sampled.tolist()) == kept


def test_top_p_with_more_tokens_than_the_first_candidates(sampler: Sampler) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 0.3, (6, 9000)).astype(np.float32))
    positions = torch.arange(6)
    sampled = sampler(logits, positions, top_p=[0.9, 0.2, 0.9, 0.001, 1.0, 0.9])
    for row, top_p in enumerate([0.9, 0.2, 0.9, 0.001, 1.0, 0.9]):
        kept = kept_tokens(logits[row].numpy(), 1.0, 0, top_p, 0.0)
        assert sampled[row].item() in near_best(kept, noise(7, 0, row, 9000))


def test_a_sample_does_not_depend_on_the_batch(sampler: Sampler) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (6, 3000)).astype(np.float32))
    seeds = np.arange(6, dtype=np.uint64) * np.uint64(2**61)
    columns = {
        "temperature": [1.0, 0.0, 0.6, 1.0, 1.0, 2.0],
        "top_k": [0, 0, 30, 0, 600, 0],
        "top_p": [1.0, 1.0, 0.9, 0.5, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
    }
    together = sampler(logits, torch.arange(6) + 10, **columns, seed=seeds)  # type: ignore[arg-type]
    for row in range(6):
        one = {name: values[row] for name, values in columns.items()}
        position = torch.tensor([row + 10])
        alone = sampler(logits[row : row + 1], position, **one, seed=int(seeds[row]))  # type: ignore[arg-type]
        assert alone.item() == together[row].item()


def test_seed_sequence_and_position_each_change_the_sample(sampler: Sampler) -> None:
    logits, here = torch.zeros(1, 50_000), torch.tensor([9])
    samples = [
        sampler(logits, here, seed=1),
        sampler(logits, here, seed=1 + 2**32),
        sampler(logits, here, seed=1, sequence=1),
        sampler(logits, here + 1, seed=1),
    ]
    assert len({one.item() for one in samples}) == 4
    assert sampler(logits, here, seed=1).item() == samples[0].item()


@pytest.mark.parametrize("limits", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 1.7}])
def test_frequencies_are_the_probabilities(sampler: Sampler, limits: dict[str, float]) -> None:
    """Chi-squared over the tokens that the filters keep; 600 ids, so that several spans have some."""
    if sampler.slow and limits:
        pytest.skip("too slow interpreted; every row is compared with the definition elsewhere")
    rows = 100 if sampler.slow else 20_000
    logits = torch.full((600,), -torch.inf)
    likely = torch.arange(3, 600, 37)
    logits[likely] = torch.linspace(2.0, -1.0, len(likely))
    sampled = sampler(logits.repeat(rows, 1), torch.arange(rows), **limits)  # type: ignore[arg-type]
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    kept = kept_tokens(logits.numpy(), **settings)  # type: ignore[arg-type]
    counts = np.bincount(sampled.numpy(), minlength=600)
    assert not counts[kept == 0].any()
    expected = rows * kept[kept > 0] / kept.sum()
    statistic = ((counts[kept > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # 4.5 standard deviations of its distribution, which is nearly normal.
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5


def test_sequences_positions_and_seeds_are_independent(sampler: Sampler) -> None:
    """Neighbouring counters and keys give unrelated samples: pairs are uniform over 4 x 4 tokens."""
    rows = 64 if sampler.slow else 8000
    logits, positions = torch.zeros(rows, 4), torch.arange(rows)
    base = sampler(logits, positions, seed=1)
    for other in (
        sampler(logits, positions + 1, seed=1),
        sampler(logits, positions, seed=2),
        sampler(logits, positions, seed=1, sequence=1),
    ):
        counts = np.bincount((base * 4 + other).numpy(), minlength=16)
        statistic = ((counts - rows / 16) ** 2 / (rows / 16)).sum()
        assert statistic < 15 + 4.5 * 30**0.5


def test_extreme_temperatures(sampler: Sampler) -> None:
    logits = torch.tensor([[3e38, 1.0, -3e38, 2e38]]).repeat(50, 1)
    assert sampler(logits, torch.arange(50), temperature=1e-38).unique().tolist() == [0]
    rows = 60 if sampler.slow else 400
    flat = sampler(torch.randn(rows, 4), torch.arange(rows), temperature=100.0)
    assert flat.unique().tolist() == [0, 1, 2, 3]


def test_masked_tokens_are_never_sampled(sampler: Sampler) -> None:
    rows = 5 if sampler.slow else 300
    logits = torch.full((rows, 70), -torch.inf)
    logits[:, [3, 69]] = 0.0
    for limits in ({}, {"top_p": 0.99}, {"top_k": 30}, {"min_p": 0.1}):
        sampled = sampler(logits, torch.arange(rows), **limits)  # type: ignore[arg-type]
        assert sampled.unique().tolist() == [3, 69]


@pytest.mark.parametrize("logit", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 3}, {"top_k": 400}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}]
)
def test_broken_logits_still_give_an_id(sampler: Sampler, limits: dict[str, float], logit: float) -> None:
    sampled = sampler(torch.full((4, 700), logit), torch.arange(4), **limits)  # type: ignore[arg-type]
    assert ((sampled >= 0) & (sampled < 700)).all()


@pytest.mark.parametrize("vocabulary", [1, 50, 4133, 4096])
def test_top1_is_the_first_of_the_largest(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    logits[0] = 0.0
    logits[0, ::2] = -0.0
    logits[1] = -torch.inf
    logits[2, vocabulary // 2] = torch.inf
    top, ids = sampling.top1(logits)
    assert torch.equal(top, logits.amax(-1))
    assert ids.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


def test_a_selection_samples_as_the_whole_batch_does() -> None:
    rows = 8
    batch = SamplingBatch.from_host(
        temperature=np.array([0.0, 0.7] * 4, np.float32),
        top_k=np.array([0, 0, 0, 5] * 2),
        top_p=np.array([1.0] * 5 + [0.8] * 3, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.arange(rows, dtype=np.uint64) + np.uint64(2**63),
        sequence=np.arange(rows),
        device=CPU,
    )
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(rows) * 3
    whole = sample(logits, batch, positions)
    for chosen in ([0, 2], [5], [1, 3, 4], [7, 6, 3, 0]):
        indices = torch.tensor(chosen)
        found = sample(logits[indices], batch.select(indices), positions[indices])
        assert found.tolist() == whole[indices].tolist()
    greedy = batch.select(torch.tensor([0, 2]))
    assert not greedy.any_random and greedy.filtered_rows is None
