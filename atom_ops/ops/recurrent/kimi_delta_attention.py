"""Kimi delta attention: the gated delta rule with a decay for each feature of the keys.

Every token, with key k, value v, decays g <= 0 [E] and rate b of a head:

    S = diag(exp(g)) S              decay of each row
    S = S + k b (v - S' k)'         the value at k moves towards v
    out = S' q

Over a chunk of tokens, with the decays G_i [E] from its beginning up to token i, the corrections
u_i = b_i (v_i - S_i' k_i) solve

    u_i + b_i sum over j < i of (k_i . exp(G_i - G_j) k_j) u_j  =  b_i (v_i - S' exp(G_i) k_i)

(Kimi Linear, arXiv:2510.26692.) The decay is within the products of keys, so that these are no GEMM, and
chunks are short. No exponent is above 0, however fast a feature decays.

T tokens, N heads, E key and F value features, G rows that are computed together, L tokens of the longest,
C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.recurrent.causal_conv import state_rows
from atom_ops.ops.recurrent.gated_delta_rule import DecayWeights, padded_rows, unit_vectors
from atom_ops.ops.recurrent.recurrent_state import StatePlan
from atom_ops.tolerances import REDUCTION

_CHUNK = 16


class _Tokens(NamedTuple):
    """Inputs of the rule, for each token and head."""

    q: Tensor
    k: Tensor
    v: Tensor
    fade: Tensor
    rate: Tensor


def _case(
    lens: list[int],
    fresh: list[int],
    heads: int,
    sizes: tuple[int, int],
    fast: bool = False,
    moves: bool = False,
) -> Case:
    """`sizes` are key and value features. `fast`: states are forgotten within a few tokens.

    `moves`: see `state_rows`.
    """
    channels = heads * (2 * sizes[0] + sizes[1])

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        plan, slots = state_rows(lens, fresh, generator, moves)
        tokens = sum(lens)
        qkv = torch.randn(tokens, channels, generator=generator).to(dtype)
        steps = torch.randn(tokens, heads * sizes[0], generator=generator).to(dtype)
        rates = torch.randn(tokens, heads + 16, generator=generator).to(dtype)[:, 8:-8]
        a_log = torch.rand(heads, generator=generator) + (2 if fast else -2)
        dt_bias = torch.rand(heads * sizes[0], generator=generator)
        states = 0.3 * torch.randn(slots, heads, *sizes, generator=generator)
        return qkv, steps, rates, DecayWeights(a_log, dt_bias), states, plan

    label = f"{heads}x{sizes[0]}x{sizes[1]}-{lens}new{fresh}{'fast' * fast}{'moves' * moves}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _case([1, 1, 1], [1], 3, (32, 32)),
        _case([1], [], 2, (24, 40)),
        _case([1, 1, 1], [1], 2, (24, 40), moves=True),
        _case([5, 1, 16, 35, 1, 33], [0, 3], 2, (32, 16)),
        _case([18, 2], [], 1, (128, 128)),
        _case([40, 1], [0], 2, (16, 16), fast=True),
    ],
    REDUCTION,
)
def kimi_delta_attention(
    qkv_TC: Tensor,
    steps_TX: Tensor,
    rates_TN: Tensor,
    decay: DecayWeights,
    recurrent_SNEF: Tensor,
    plan: StatePlan,
) -> Tensor:
    """The output of each token, [T, N, F]; the rows' slots then hold their new states.

    A row of `qkv_TC` is N query and N key heads of E features, then N value heads of F features. Queries and
    keys are L2-normalised, queries divided by sqrt(E). `steps_TX` [T, N * E] are the inputs of the decays,
    whose `dt_bias_N` has as many entries; `rates_TN` those of the rates (before the sigmoid). Of both only
    the last dimension must be contiguous. Computed in float32.
    """
    heads, key_size, value_size = recurrent_SNEF.shape[1:]
    q_TX, k_TX, v_TX = qkv_TC.float().split([heads * key_size, heads * key_size, heads * value_size], 1)
    q_TNE, k_TNE = (unit_vectors(x.unflatten(1, (heads, key_size))) for x in (q_TX, k_TX))
    open_TNE = functional.softplus(steps_TX.float() + decay.dt_bias_N).unflatten(1, (heads, key_size))
    fade_TNE = -decay.a_log_N.exp()[:, None] * open_TNE
    v_TNF = v_TX.unflatten(1, (heads, value_size))
    inputs = _Tokens(q_TNE * key_size**-0.5, k_TNE, v_TNF, fade_TNE, rates_TN.float().sigmoid())

    tokens = plan.num_tokens
    out_TNF = qkv_TC.new_zeros(tokens + 1, heads, value_size, dtype=torch.float32)  # the last: of padding
    for rows_G, longest in plan.groups():
        token_GL = plan.query_starts_R1[rows_G, None] + torch.arange(longest, device=rows_G.device)
        padding_GL = token_GL >= plan.query_starts_R1[rows_G + 1, None]
        given = _Tokens(*[padded_rows(x, token_GL.clamp(max=tokens - 1), padding_GL) for x in inputs])
        out_GLNF, states = _in_chunks(given, plan.read(recurrent_SNEF, rows_G))
        plan.write(recurrent_SNEF, rows_G, states)
        at = token_GL.masked_fill(padding_GL, tokens).flatten().long()
        out_TNF.index_copy_(0, at, out_GLNF.flatten(0, 1))
    return out_TNF[:tokens].to(qkv_TC.dtype)


def _in_chunks(given: _Tokens, state_GNEF: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs [G, L, N, F], new states) of rows of L tokens, [G, L, N, …] each."""
    results = []
    for chunk in zip(*(x.split(_CHUNK, 1) for x in given), strict=True):
        out_GNCF, state_GNEF = _chunk(_Tokens(*(x.movedim(1, 2) for x in chunk)), state_GNEF)
        results.append(out_GNCF.movedim(2, 1))
    return torch.cat(results, 1), state_GNEF


def _chunk(given: _Tokens, state_GNEF: Tensor) -> tuple[Tensor, Tensor]:
    """The same of one chunk, [G, N, C, …] each."""
    q, k, v, fade, rate = given
    since = fade.cumsum(-2)  # G_i
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)[..., None]
    between = (since.unsqueeze(-2) - since.unsqueeze(-3)).masked_fill(later, -torch.inf).exp()
    faded = k.unsqueeze(-3) * between
    alike_CC = torch.einsum("gnie,gnije->gnij", k, faded)
    asked_CC = torch.einsum("gnie,gnije->gnij", q, faded)
    wanted_CF = rate[..., None] * (v - (k * since.exp()) @ state_GNEF)
    system_CC = rate[..., None] * alike_CC
    change_CF = torch.linalg.solve_triangular(system_CC, wanted_CF, upper=False, unitriangular=True)
    out_CF = (q * since.exp()) @ state_GNEF + asked_CC @ change_CF
    to_end = k * (since[..., -1:, :] - since).exp()
    return out_CF, since[..., -1, :, None].exp() * state_GNEF + to_end.mT @ change_CF
