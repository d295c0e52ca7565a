"""A row's bits on a GPU: alone, in any batch, as a decode and as part of a prompt."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.ops.attention.attention_plan import BATCH_INVARIANT_SPLIT
from tests.helpers.kernels.paged_step import CPU, Step

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
TOKENS = (1, 2, 3, 16, 17, 64, 65, 128, 200, 257, 1000, 4096)
SHAPES = (
    # Qwen3-0.6B, Qwen3-8B and Llama-3.1-8B: outputs x inputs; the vocabulary shortened.
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (20000, 1024)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (28672, 4096), (4096, 14336), (151936, 4096)),
    # SmolLM2-135M
    *((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    # Shards of four ranks, and sizes that no tile divides.
    *((1536, 4096), (4096, 3072), (1000, 520), (49, 70)),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU, batch_invariant=True)
    yield
    backend.resolve(CPU)


def product(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(shape, device=GPU, dtype=dtype).mul_(shape[1] ** -0.5)
    x = torch.randn(max(TOKENS), shape[1], device=GPU, dtype=dtype)
    return x, weight, torch.randn(shape[0], device=GPU, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, BF16) for shape in SHAPES), *((shape, torch.float16) for shape in SHAPES[-4:])],
    ids=str,
)
def test_gemm_of_any_number_of_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = product(shape, dtype)
    whole, biased = atom_ops.linear(x, weight), atom_ops.linear(x, weight, bias)
    for tokens in TOKENS:
        for first in (0, len(x) - tokens):
            rows = slice(first, first + tokens)
            assert torch.equal(atom_ops.linear(x[rows], weight), whole[rows]), (tokens, first)
            assert torch.equal(atom_ops.linear(x[rows], weight, bias), biased[rows]), (tokens, first)
    assert not atom_ops.linear.ran_reference
    exact = x[:64].double() @ weight.double().T
    library = (torch.nn.functional.linear(x[:64], weight) - exact).norm()
    assert (whole[:64] - exact).norm() < 1.05 * library
    torch.testing.assert_close(biased, whole + bias, atol=0.06, rtol=0.02)


@pytest.mark.parametrize("shape", [(151936, 1024), (49152, 576)], ids=str)
def test_logits_in_float32(shape: tuple[int, int]) -> None:
    x, weight, _ = product(shape, BF16)
    whole = atom_ops.linear(x[:300], weight, None, torch.float32)
    for tokens in (1, 2, 17, 64, 65, 200):
        assert torch.equal(atom_ops.linear(x[:tokens], weight, None, torch.float32), whole[:tokens]), tokens
    torch.testing.assert_close(whole.double(), x[:300].double() @ weight.double().T, atol=2e-3, rtol=1e-3)


def test_gemm_in_float32() -> None:
    x, weight, bias = product((300, 520), torch.float32)
    whole = atom_ops.linear(x, weight, bias)
    for tokens in TOKENS:
        assert torch.equal(atom_ops.linear(x[:tokens], weight, bias), whole[:tokens]), tokens
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias, atol=1e-4, rtol=1e-4)


def test_any_alignment_of_rows() -> None:
    """Neither the address of the tokens nor their stride changes a bit."""
    x, weight, _ = product((4096, 1024), BF16)
    whole = atom_ops.linear(x[:40], weight)
    shifted = torch.empty(40 * 1024 + 1, device=GPU, dtype=BF16)[1:].view(40, 1024)
    assert torch.equal(atom_ops.linear(shifted.copy_(x[:40]), weight), whole)
    wide = torch.zeros(40, 2048, device=GPU, dtype=BF16)
    wide[:, :1024] = x[:40]
    assert torch.equal(atom_ops.linear(wide[:, :1024], weight), whole)


def test_a_captured_gemm_has_the_same_bits() -> None:
    x, weight, bias = product((6144, 4096), BF16)
    given = x[:48].clone()
    atom_ops.linear(given, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atom_ops.linear(given, weight, bias)
    given.copy_(x[100:148])
    graph.replay()
    assert torch.equal(out, atom_ops.linear(x, weight, bias)[100:148])


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (32, 8, 128), (9, 3, 64)])
def test_attention_of_a_decode_alone_in_a_batch_and_at_the_end_of_a_prompt(
    heads: int, kv_heads: int, width: int
) -> None:
    lens = [1500, 900, 512, 513, 70]
    step = Step(lens, lens, heads, kv_heads, dtype=BF16, cache_dtype=BF16, width=width, device=GPU)
    ends = torch.tensor(lens).cumsum(0)

    def last_tokens(rows: list[int], query_lens: list[int]) -> torch.Tensor:
        plan = atom_ops.plan_attention(
            np.array(query_lens, np.int32), step.context_lens[rows], step.table[rows], GPU
        )
        plan = dataclasses.replace(plan, split_tokens=BATCH_INVARIANT_SPLIT)
        q = torch.cat([step.q[ends[r] - n : ends[r]] for r, n in zip(rows, query_lens, strict=True)])
        return atom_ops.paged_attention(q, step.cache, plan, step.rule)[
            torch.tensor(query_lens).cumsum(0) - 1
        ]

    decodes = last_tokens([0, 1, 2, 3, 4], [1] * 5)
    assert torch.equal(last_tokens([0, 1, 2, 3, 4], lens), decodes)
    assert torch.equal(last_tokens([4, 2, 0], [70, 1, 33]), decodes[[4, 2, 0]])
    for row in range(len(lens)):
        assert torch.equal(last_tokens([row], [1])[0], decodes[row]), row


def test_norms_activations_projections_and_logprobs() -> None:
    x, residual = torch.randn(2, 300, 4096, device=GPU).to(BF16).unbind()
    weight = torch.rand(4096, device=GPU).to(BF16)
    logits, ids = torch.randn(64, 151936, device=GPU) * 4, torch.arange(64, device=GPU)
    normed, total = atom_ops.add_rms_norm(x, residual, weight, 1e-6)
    plain, gated = atom_ops.rms_norm(x, weight, 1e-6), atom_ops.silu_and_mul(x)
    logprobs = atom_ops.token_logprobs(logits, ids, 5).values_NW
    for row in (0, 7, 63):
        one = slice(row, row + 1)
        alone = atom_ops.add_rms_norm(x[one], residual[one], weight, 1e-6)
        assert torch.equal(alone[0], normed[one]) and torch.equal(alone[1], total[one])
        assert torch.equal(atom_ops.rms_norm(x[one], weight, 1e-6), plain[one])
        assert torch.equal(atom_ops.silu_and_mul(x[one]), gated[one])
        found = atom_ops.token_logprobs(logits[one].clone(), ids[one], 5).values_NW
        assert torch.equal(found, logprobs[one]), row
