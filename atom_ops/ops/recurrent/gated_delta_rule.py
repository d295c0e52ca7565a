"""Linear attention by the gated delta rule: the state of a row is one matrix for each head.

Every token, with key k, value v, decay g <= 0 and rate b of a head:

    S = exp(g) S                    decay
    S = S + k b (v - S' k)'         the value at k moves towards v
    out = S' q

Over a chunk of tokens the corrections u_i = b_i (v_i - S_i' k_i) solve a triangular system: with the
decay G_i from the chunk's beginning up to token i,

    u_i + b_i sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j  =  b_i (v_i - exp(G_i) S' k_i)

so that a chunk is a few GEMMs, and only S passes from one chunk to the next. (Gated delta
networks, arXiv:2412.06464.)

T tokens, K key heads, N value heads (a multiple of them), E key and F value features, G rows that are
computed together, L tokens of the longest, M chunks of C tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.recurrent.causal_conv import state_rows
from atom_ops.ops.recurrent.recurrent_state import StatePlan
from atom_ops.tolerances import REDUCTION

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys before the division."""

_CHUNK = 64


@dataclass(frozen=True, slots=True)
class DecayWeights:
    """Decay parameters of each head, float32: g = -exp(a_log) softplus(input + dt_bias)."""

    a_log_N: Tensor
    dt_bias_N: Tensor


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
    heads: tuple[int, int],
    sizes: tuple[int, int],
    repeat: bool = False,
    moves: bool = False,
) -> Case:
    """`heads` are key and value heads, `sizes` their features. `repeat`: all tokens are nearly the same.

    `moves`: see `state_rows`.
    """
    channels = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        plan, slots = state_rows(lens, fresh, generator, moves)
        qkv = torch.randn(sum(lens), channels, generator=generator)
        qkv = (qkv[:1] + 0.01 * qkv if repeat else qkv).to(dtype)
        gates = torch.randn(sum(lens), 2 * heads[1] + 16, generator=generator).to(dtype)[:, 8:-8]
        a_log, dt_bias = torch.rand(2, heads[1], generator=generator)
        states = 0.3 * torch.randn(slots, heads[1], *sizes, generator=generator)
        return qkv, gates, DecayWeights(a_log - 1, dt_bias), states, plan

    label = f"{heads[0]}/{heads[1]}x{sizes[0]}x{sizes[1]}-{lens}new{fresh}{'same' * repeat}{'moves' * moves}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _case([1, 1, 1], [1], (2, 4), (32, 32)),
        _case([1], [], (1, 3), (24, 40)),
        _case([1, 1, 1], [1], (1, 2), (24, 40), moves=True),
        _case([5, 1, 16, 70, 1, 33], [0, 3], (2, 4), (32, 16)),
        _case([40, 2], [], (1, 2), (128, 128)),
        _case([1, 150, 64, 1], [1], (1, 2), (16, 16), repeat=True),
    ],
    REDUCTION,
)
def gated_delta_rule(
    qkv_TC: Tensor, gates_T2N: Tensor, decay: DecayWeights, recurrent_SNEF: Tensor, plan: StatePlan
) -> Tensor:
    """The output of each token, [T, N, F]; the rows' slots then hold their new states.

    A row of `qkv_TC` is K query and K key heads of E features, then N value heads of F features.
    Queries and keys are L2-normalised, queries divided by sqrt(E). `gates_T2N` (only the last
    dimension must be contiguous) are the inputs of the rates b (before the sigmoid), then of the
    decays g. Computed in float32.
    """
    heads, key_size, value_size = recurrent_SNEF.shape[1:]
    qk_TC, v_TC = qkv_TC.float().split([qkv_TC.shape[1] - heads * value_size, heads * value_size], 1)
    q_TKE, k_TKE = qk_TC.unflatten(1, (-1, key_size)).chunk(2, 1)
    sharing = heads // q_TKE.shape[1]
    q_TNE = (unit_vectors(q_TKE) * key_size**-0.5).repeat_interleave(sharing, 1)
    k_TNE = unit_vectors(k_TKE).repeat_interleave(sharing, 1)
    rate_TN, step_TN = gates_T2N.float().chunk(2, 1)
    fade_TN = -decay.a_log_N.exp() * functional.softplus(step_TN + decay.dt_bias_N)
    inputs = _Tokens(q_TNE, k_TNE, v_TC.unflatten(1, (heads, value_size)), fade_TN, rate_TN.sigmoid())

    tokens = plan.num_tokens
    out_TNF = qkv_TC.new_zeros(tokens + 1, heads, value_size, dtype=torch.float32)  # the last: of padding
    for rows_G, longest in plan.groups():
        token_GL = plan.query_starts_R1[rows_G, None] + torch.arange(longest, device=rows_G.device)
        padding_GL = token_GL >= plan.query_starts_R1[rows_G + 1, None]
        given = _Tokens(*[padded_rows(x, token_GL.clamp(max=tokens - 1), padding_GL) for x in inputs])
        rule = _one_token if longest == 1 else _in_chunks
        out_GLNF, states = rule(given, plan.read(recurrent_SNEF, rows_G))
        plan.write(recurrent_SNEF, rows_G, states)
        out_TNF.index_copy_(
            0, token_GL.masked_fill(padding_GL, tokens).flatten().long(), out_GLNF.flatten(0, 1)
        )
    return out_TNF[:tokens].to(qkv_TC.dtype)


def unit_vectors(x_TKE: Tensor) -> Tensor:
    """L2-normalised over the last dimension."""
    return x_TKE * (x_TKE.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def padded_rows(x: Tensor, token_GL: Tensor, padding_GL: Tensor) -> Tensor:
    """The rows' tokens, [G, L, …], zero in padding: rate 0 and decay 0 leave the state as it is."""
    found = x.index_select(0, token_GL.flatten()).unflatten(0, token_GL.shape)
    return found.masked_fill(padding_GL.view(*padding_GL.shape, *[1] * (x.dim() - 1)), 0.0)


def _one_token(given: _Tokens, state_GNEF: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs [G, 1, N, F], new states) of rows of one token, L = 1."""
    q_GNE, k_GNE, v_GNF, fade_GN, rate_GN = (x.squeeze(1) for x in given)
    state_GNEF = state_GNEF * fade_GN.exp()[..., None, None]
    change_GNF = rate_GN[..., None] * (v_GNF - torch.einsum("gnef,gne->gnf", state_GNEF, k_GNE))
    state_GNEF = state_GNEF + k_GNE[..., None] * change_GNF.unsqueeze(-2)
    return torch.einsum("gnef,gne->gnf", state_GNEF, q_GNE).unsqueeze(1), state_GNEF


def _in_chunks(given: _Tokens, state_GNEF: Tensor) -> tuple[Tensor, Tensor]:
    """The same for rows of L tokens, [G, L, N, …] each."""
    length = given.q.shape[1]
    chunk = min(length, _CHUNK)

    def chunks(x: Tensor) -> Tensor:
        """[M, G, N, C, …]."""
        pad = -length % chunk
        x = torch.cat((x, x.new_zeros(x.shape[0], pad, *x.shape[2:])), 1) if pad else x
        return x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2))

    q, k, v, fade, rate = map(chunks, given)
    since = fade.cumsum(-1)[..., None]  # G_i
    rate = rate[..., None]  # b_i
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay_CC = (since - since.mT).masked_fill(later, -torch.inf).exp()
    system = rate * (k @ k.mT) * decay_CC
    wanted = torch.cat((v, since.exp() * k), -1) * rate
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    from_v, from_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.mT) * decay_CC
    from_past = q * since.exp()
    to_end = k * (since[..., -1:, :] - since).exp()
    whole = since[..., -1:, :].exp()

    results = []
    for at in range(len(q)):
        change = from_v[at] - from_k[at] @ state_GNEF
        results.append(from_past[at] @ state_GNEF + within[at] @ change)
        state_GNEF = whole[at] * state_GNEF + to_end[at].mT @ change
    out_MGNCF = torch.stack(results)
    return out_MGNCF.movedim((0, 2), (1, 3)).flatten(1, 2)[:, :length], state_GNEF
