"""The gated delta rule: one program for some value features of a head of a row.

Columns of a state are independent, so a program holds its columns [E, features] in registers from
the row's first token to its last. Single tokens apply the rule directly; longer rows are computed in
chunks of 16 tokens, whose triangular system is solved row by row (`_solve`). Sums are in float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.gated_delta_rule import NORM_EPS, DecayWeights, gated_delta_rule
from atom_ops.ops.recurrent_state import StatePlan
from atom_ops.triton_impl import NEEDS, runs_on
from atom_ops.triton_impl.pdl import launch_options, pdl_begin

_CHUNK = 16
_FEATURES = 32
_MOST_KEY_FEATURES = 256
_EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _fade(step, a_log, dt_bias):
    """The logarithm of the decay."""
    x = step.to(tl.float32) + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _one_token_each(
    qkv, gates, a_log, dt_bias, states, slots, fresh, starts, out, qkv_stride, gates_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, N, blocks of F)."""
    pdl_begin(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    key_E = tl.arange(0, BLOCK_E)
    value_F = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    slot, token = tl.load(slots + row), tl.load(starts + row).to(tl.int64)
    qkv += token * qkv_stride
    gates += token * gates_stride + head
    key_head = head // (HEADS // KEY_HEADS)
    q_E = tl.load(qkv + key_head * KEY + key_E, mask=key_E < KEY, other=0.0).to(tl.float32)
    k_E = tl.load(qkv + (KEY_HEADS + key_head) * KEY + key_E, mask=key_E < KEY, other=0.0).to(tl.float32)
    q_E *= tl.rsqrt(tl.sum(q_E * q_E, 0) + _EPS) * scale
    k_E *= tl.rsqrt(tl.sum(k_E * k_E, 0) + _EPS)
    values = qkv + 2 * KEY_HEADS * KEY + head * VALUE
    v_F = tl.load(values + value_F, mask=value_F < VALUE, other=0.0).to(tl.float32)
    rate = tl.sigmoid(tl.load(gates).to(tl.float32))
    fade = _fade(tl.load(gates + HEADS), tl.load(a_log + head), tl.load(dt_bias + head))

    inside_EF = (key_E < KEY)[:, None] & (value_F < VALUE)[None, :]
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    known_EF = inside_EF & (slot >= 0) & (tl.load(fresh + row) == 0)
    state_EF = tl.load(states + at_EF, mask=known_EF, other=0.0) * tl.exp(fade)
    change_F = rate * (v_F - tl.sum(state_EF * k_E[:, None], 0))
    state_EF += k_E[:, None] * change_F[None, :]
    found_F = tl.sum(state_EF * q_E[:, None], 0)
    tl.store(states + at_EF, state_EF, mask=inside_EF & (slot >= 0))
    out += (token * HEADS + head) * VALUE
    tl.store(out + value_F, found_F.to(out.dtype.element_ty), mask=value_F < VALUE)


@triton.jit
def _unit_rows(x, token_C, key_E, stride, inside_C, KEY: tl.constexpr):
    """The tokens' vectors at `x`, L2-normalised."""
    inside_CE = inside_C[:, None] & (key_E < KEY)[None, :]
    x_CE = tl.load(x + token_C[:, None] * stride + key_E[None, :], mask=inside_CE, other=0.0).to(tl.float32)
    return x_CE * tl.rsqrt(tl.sum(x_CE * x_CE, 1) + _EPS)[:, None]


@triton.jit
def _solve(system_CC, wanted_CF, CHUNK: tl.constexpr):
    """Forward substitution: u_i + sum over j < i of system_ij u_j = wanted_i; system is strictly lower."""
    token_C = tl.arange(0, CHUNK)
    for at in tl.static_range(1, CHUNK):
        row_C = tl.sum(tl.where((token_C == at)[:, None], system_CC, 0.0), 0)
        known_F = tl.sum(row_C[:, None] * wanted_CF, 0)
        wanted_CF = tl.where((token_C == at)[:, None], wanted_CF - known_F[None, :], wanted_CF)
    return wanted_CF


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _any_tokens(
    qkv, gates, a_log, dt_bias, states, slots, fresh, starts, out, qkv_stride, gates_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of F, N, R)."""
    pdl_begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (slot < 0) | (length == 0):
        return
    key_E, earlier_C = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    value_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    queries = qkv + (head // (HEADS // KEY_HEADS)) * KEY
    values = qkv + 2 * KEY_HEADS * KEY + head * VALUE
    head_a_log, head_dt_bias = tl.load(a_log + head), tl.load(dt_bias + head)
    inside_EF = (key_E < KEY)[:, None] & (value_F < VALUE)[None, :]
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    state_EF = tl.load(states + at_EF, mask=inside_EF & (tl.load(fresh + row) == 0), other=0.0)

    for first in range(0, length, CHUNK):
        inside_C = first + earlier_C < length
        token_C = (start + first + earlier_C).to(tl.int64)
        q_CE = _unit_rows(queries, token_C, key_E, qkv_stride, inside_C, KEY) * scale
        k_CE = _unit_rows(queries + KEY_HEADS * KEY, token_C, key_E, qkv_stride, inside_C, KEY)
        inside_CF = inside_C[:, None] & (value_F < VALUE)[None, :]
        v_CF = tl.load(values + token_C[:, None] * qkv_stride + value_F[None, :], mask=inside_CF, other=0.0)
        gate_C = gates + token_C * gates_stride + head
        rate_C = tl.sigmoid(tl.load(gate_C, mask=inside_C, other=0.0).to(tl.float32))
        fade_C = _fade(tl.load(gate_C + HEADS, mask=inside_C, other=0.0), head_a_log, head_dt_bias)
        # Tokens past the row's end leave the state as it is: rate 0, no decay.
        rate_C, fade_C = tl.where(inside_C, rate_C, 0.0), tl.where(inside_C, fade_C, 0.0)
        since_C, whole = tl.cumsum(fade_C, 0), tl.sum(fade_C, 0)

        seen_CC = earlier_C[None, :] <= earlier_C[:, None]
        kept_CC = tl.exp(tl.where(seen_CC, since_C[:, None] - since_C[None, :], float("-inf")))
        alike_CC = tl.dot(k_CE, tl.trans(k_CE), input_precision="ieee") * kept_CC * rate_C[:, None]
        before_CC = earlier_C[None, :] < earlier_C[:, None]
        past_CF = tl.dot(k_CE, state_EF, input_precision="ieee") * tl.exp(since_C)[:, None]
        change_CF = _solve(
            tl.where(before_CC, alike_CC, 0.0), rate_C[:, None] * (v_CF.to(tl.float32) - past_CF), CHUNK
        )
        asked_CC = tl.dot(q_CE, tl.trans(k_CE), input_precision="ieee") * kept_CC
        found_CF = tl.dot(q_CE, state_EF, input_precision="ieee") * tl.exp(since_C)[:, None]
        found_CF += tl.dot(asked_CC, change_CF, input_precision="ieee")
        left_CE = k_CE * tl.exp(whole - since_C)[:, None]
        state_EF = state_EF * tl.exp(whole) + tl.dot(tl.trans(left_CE), change_CF, input_precision="ieee")
        out_CF = out + (token_C[:, None] * HEADS + head) * VALUE + value_F[None, :]
        tl.store(out_CF, found_CF.to(out.dtype.element_ty), mask=inside_CF)
    tl.store(states + at_EF, state_EF, mask=inside_EF)


def _supports(
    qkv_TC: Tensor, gates_T2N: Tensor, decay: DecayWeights, recurrent_SNEF: Tensor, plan: StatePlan
) -> bool:
    in_order = recurrent_SNEF.is_contiguous() and qkv_TC.stride(1) == gates_T2N.stride(1) == 1
    return in_order and qkv_TC.is_floating_point() and recurrent_SNEF.shape[2] <= _MOST_KEY_FEATURES


@gated_delta_rule.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(
    qkv_TC: Tensor, gates_T2N: Tensor, decay: DecayWeights, recurrent_SNEF: Tensor, plan: StatePlan
) -> Tensor:
    heads, key, value = recurrent_SNEF.shape[1:]
    rows, features = len(plan.slots_R), min(max(triton.next_power_of_2(value), 16), _FEATURES)
    out_TNF = qkv_TC.new_empty(len(qkv_TC), heads, value)
    feature_blocks = triton.cdiv(value, features)
    arguments = (
        qkv_TC, gates_T2N, decay.a_log_N, decay.dt_bias_N, recurrent_SNEF,
        plan.slots_R, plan.fresh_R, plan.query_starts_R1, out_TNF,
        qkv_TC.stride(0), gates_T2N.stride(0), key**-0.5,
    )  # fmt: skip
    settings = {
        "KEY_HEADS": (qkv_TC.shape[1] - heads * value) // (2 * key),
        "HEADS": heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK_E": max(triton.next_power_of_2(key), 16),
        "BLOCK_F": features,
        "num_warps": 4,
        **launch_options(qkv_TC.device),
    }
    if plan.max_query_len == 1:
        _one_token_each[(rows, heads, feature_blocks)](*arguments, **settings)
    else:
        _any_tokens[(feature_blocks, heads, rows)](*arguments, CHUNK=_CHUNK, **settings)
    return out_TNF
