"""Kimi delta attention: single tokens apply the rule directly, longer rows in chunks of 16 tokens.

The columns of a state are independent, so a program holds some of them [E, features] from a row's first token
to its last. The products of a chunk's keys, whose decays differ by feature, are summed key after key; the
programs of a head each compute them. Products are as accurate as those of float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.recurrent.gated_delta_rule import NORM_EPS, DecayWeights
from atom_ops.ops.recurrent.kimi_delta_attention import kimi_delta_attention
from atom_ops.ops.recurrent.recurrent_state import StatePlan, starts_alike
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on
from atom_ops.triton_impl.recurrent.gated_delta_rule import _dot, _fade, _precision

_CHUNK = 16
_FEATURES = 32
_MOST_KEY_FEATURES = 256
_EPS = tl.constexpr(NORM_EPS)


@triton.jit(do_not_specialize_on_alignment=["slots", "sources", "starts", "fresh"])
def _one_token_each(
    qkv, steps, rates, a_log, dt_bias, states, slots, sources, fresh, starts, out,
    qkv_stride, steps_stride, rates_stride, scale,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, N, blocks of F). Without `ALL`, other rows may have more tokens.

    A row reads the state of its source, and writes its slot.
    """
    pdl_begin(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    key_E = tl.arange(0, BLOCK_E)
    value_F = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    slot = tl.load(slots + row)
    token = tl.load(starts + row).to(tl.int64)
    if not ALL:  # noqa: SIM102 (the load is not compiled with ALL)
        if tl.load(starts + row + 1) != token + 1:
            return
    qkv += token * qkv_stride
    inside_E, inside_F = key_E < KEY, value_F < VALUE
    feature_E = head * KEY + key_E
    q_E = tl.load(qkv + feature_E, mask=inside_E, other=0.0).to(tl.float32)
    k_E = tl.load(qkv + HEADS * KEY + feature_E, mask=inside_E, other=0.0).to(tl.float32)
    q_E *= tl.rsqrt(tl.sum(q_E * q_E, 0) + _EPS) * scale
    k_E *= tl.rsqrt(tl.sum(k_E * k_E, 0) + _EPS)
    values = qkv + 2 * HEADS * KEY + head * VALUE
    v_F = tl.load(values + value_F, mask=inside_F, other=0.0).to(tl.float32)
    rate = tl.sigmoid(tl.load(rates + token * rates_stride + head).to(tl.float32))
    step_E = tl.load(steps + token * steps_stride + feature_E, mask=inside_E, other=0.0)
    fade_E = _fade(step_E, tl.load(a_log + head), tl.load(dt_bias + feature_E, mask=inside_E, other=0.0))

    inside_EF = inside_E[:, None] & inside_F[None, :]
    read = states + (tl.load(sources + row) * HEADS + head) * (KEY * VALUE)
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    known_EF = inside_EF & (slot >= 0) & (tl.load(fresh + row) == 0)
    state_EF = tl.load(read + at_EF, mask=known_EF, other=0.0) * tl.exp(fade_E)[:, None]
    change_F = rate * (v_F - tl.sum(state_EF * k_E[:, None], 0))
    state_EF += k_E[:, None] * change_F[None, :]
    found_F = tl.sum(state_EF * q_E[:, None], 0)
    tl.store(states + at_EF, state_EF, mask=inside_EF & (slot >= 0))
    out += (token * HEADS + head) * VALUE
    tl.store(out + value_F, found_F.to(out.dtype.element_ty), mask=inside_F)


@triton.jit
def _products(q_CE, k_CE, since_CE, CHUNK: tl.constexpr):
    """Products of faded keys with keys and with queries, [C, C] each: row i is asked, column j answers."""
    row_C = tl.arange(0, CHUNK)
    alike_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    asked_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(CHUNK):
        this_CE = (row_C == at)[:, None]
        key_E = tl.sum(tl.where(this_CE, k_CE, 0.0), 0)
        since_E = tl.sum(tl.where(this_CE, since_CE, 0.0), 0)
        # The difference is above 0 for earlier rows, whose products the caller masks.
        faded_CE = key_E[None, :] * tl.exp(tl.minimum(since_CE - since_E[None, :], 0.0))
        column_CC = (row_C == at)[None, :]
        alike_CC = tl.where(column_CC, tl.sum(k_CE * faded_CE, 1)[:, None], alike_CC)
        asked_CC = tl.where(column_CC, tl.sum(q_CE * faded_CE, 1)[:, None], asked_CC)
    return alike_CC, asked_CC


@triton.jit
def _inverse(system_CC, CHUNK: tl.constexpr):
    """The inverse of I + a strictly lower triangular matrix, by forward substitution."""
    row_C = tl.arange(0, CHUNK)
    inverse_CC = tl.where(row_C[:, None] == row_C[None, :], 1.0, 0.0)
    for at in range(1, CHUNK):
        system_C = tl.sum(tl.where((row_C == at)[:, None], system_CC, 0.0), 0)
        known_C = tl.sum(system_C[:, None] * inverse_CC, 0)
        inverse_CC = tl.where((row_C == at)[:, None], inverse_CC - known_C[None, :], inverse_CC)
    return inverse_CC


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _chunks(
    qkv, steps, rates, a_log, dt_bias, states, slots, fresh, starts, out,
    qkv_stride, steps_stride, rates_stride, scale,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of F, N, R). The rows with several tokens, chunk after chunk."""
    pdl_begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (slot < 0) | (length <= 1):
        return
    key_E = tl.arange(0, BLOCK_E)
    row_C = tl.arange(0, CHUNK)
    value_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_E, inside_F = key_E < KEY, value_F < VALUE
    queries = qkv + head * KEY
    keys = queries + HEADS * KEY
    values = qkv + 2 * HEADS * KEY + head * VALUE
    decay = tl.load(a_log + head)
    bias_E = tl.load(dt_bias + head * KEY + key_E, mask=inside_E, other=0.0)
    inside_EF = inside_E[:, None] & inside_F[None, :]
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    state_EF = tl.load(states + at_EF, mask=inside_EF & (tl.load(fresh + row) == 0), other=0.0)

    for first in range(0, length, CHUNK):
        inside_C = first + row_C < length
        token_C = (start + first + row_C).to(tl.int64)
        inside_CE = inside_C[:, None] & inside_E[None, :]
        inside_CF = inside_C[:, None] & inside_F[None, :]
        at_CE = token_C[:, None] * qkv_stride + key_E[None, :]
        q_CE = tl.load(queries + at_CE, mask=inside_CE, other=0.0).to(tl.float32)
        k_CE = tl.load(keys + at_CE, mask=inside_CE, other=0.0).to(tl.float32)
        q_CE *= (tl.rsqrt(tl.sum(q_CE * q_CE, 1) + _EPS) * scale)[:, None]
        k_CE *= tl.rsqrt(tl.sum(k_CE * k_CE, 1) + _EPS)[:, None]
        v_CF = tl.load(values + token_C[:, None] * qkv_stride + value_F[None, :], mask=inside_CF, other=0.0)
        rate_C = tl.load(rates + token_C * rates_stride + head, mask=inside_C, other=0.0)
        rate_C = tl.sigmoid(rate_C.to(tl.float32))
        step_at_CE = token_C[:, None] * steps_stride + head * KEY + key_E[None, :]
        fade_CE = _fade(tl.load(steps + step_at_CE, mask=inside_CE, other=0.0), decay, bias_E[None, :])
        fade_CE = tl.where(inside_CE, fade_CE, 0.0)
        since_CE = tl.cumsum(fade_CE, 0)
        whole_E = tl.sum(fade_CE, 0)

        alike_CC, asked_CC = _products(q_CE, k_CE, since_CE, CHUNK)
        alike_CC = tl.where(row_C[None, :] < row_C[:, None], alike_CC * rate_C[:, None], 0.0)
        asked_CC = tl.where(row_C[None, :] <= row_C[:, None], asked_CC, 0.0)
        zeros_CF = tl.zeros([CHUNK, BLOCK_F], tl.float32)
        past_CE = tl.exp(since_CE)
        wanted_CF = v_CF.to(tl.float32) - _dot(k_CE * past_CE, state_EF, zeros_CF, PRECISION)
        wanted_CF *= rate_C[:, None]
        change_CF = _dot(_inverse(alike_CC, CHUNK), wanted_CF, zeros_CF, PRECISION)
        found_CF = _dot(q_CE * past_CE, state_EF, zeros_CF, PRECISION)
        found_CF = _dot(asked_CC, change_CF, found_CF, PRECISION)
        to_end_CE = k_CE * tl.exp(whole_E[None, :] - since_CE)
        state_EF = _dot(tl.trans(to_end_CE), change_CF, state_EF * tl.exp(whole_E)[:, None], PRECISION)
        out_CF = out + (token_C[:, None] * HEADS + head) * VALUE + value_F[None, :]
        tl.store(out_CF, found_CF.to(out.dtype.element_ty), mask=inside_CF)
    tl.store(states + at_EF, state_EF, mask=inside_EF)


def _supports(
    qkv_TC: Tensor,
    steps_TX: Tensor,
    rates_TN: Tensor,
    decay: DecayWeights,
    recurrent_SNEF: Tensor,
    plan: StatePlan,
) -> bool:
    in_order = qkv_TC.stride(1) == steps_TX.stride(1) == rates_TN.stride(1) == 1
    fits = recurrent_SNEF.is_contiguous() and recurrent_SNEF.shape[2] <= _MOST_KEY_FEATURES
    return in_order and fits and qkv_TC.is_floating_point() and starts_alike(plan)


@kimi_delta_attention.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(
    qkv_TC: Tensor,
    steps_TX: Tensor,
    rates_TN: Tensor,
    decay: DecayWeights,
    recurrent_SNEF: Tensor,
    plan: StatePlan,
) -> Tensor:
    heads, key, value = recurrent_SNEF.shape[1:]
    rows = len(plan.slots_R)
    features = min(max(triton.next_power_of_2(value), 16), _FEATURES)
    feature_blocks = triton.cdiv(value, features)
    out_TNF = qkv_TC.new_empty(len(qkv_TC), heads, value)
    given = qkv_TC, steps_TX, rates_TN, decay.a_log_N, decay.dt_bias_N, recurrent_SNEF, plan.slots_R
    rest = (
        plan.fresh_R, plan.query_starts_R1, out_TNF,
        qkv_TC.stride(0), steps_TX.stride(0), rates_TN.stride(0), key**-0.5,
    )  # fmt: skip
    settings = {
        "HEADS": heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK_E": max(triton.next_power_of_2(key), 16),
        "BLOCK_F": features,
        "num_warps": 4,
        **launch_options(qkv_TC.device),
    }
    single = plan.max_query_len == 1
    _one_token_each[(rows, heads, feature_blocks)](*given, plan.starts_from_R, *rest, ALL=single, **settings)
    if not single:
        _chunks[(feature_blocks, heads, rows)](
            *given, *rest, CHUNK=_CHUNK, PRECISION=_precision(), num_stages=1, **settings
        )
    return out_TNF
