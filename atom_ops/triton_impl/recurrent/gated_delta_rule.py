"""The gated delta rule: single tokens apply it directly, longer rows in chunks of 64 tokens.

What does not depend on the state is computed for all chunks in parallel (`_solve_chunks`): the inverse of
each chunk's triangular system. Only the states pass from chunk to chunk (`_pass_states`); their columns are
independent, so a program holds some of them [E, features] from a row's first token to its last. Products
are as accurate as those of float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.recurrent.gated_delta_rule import NORM_EPS, DecayWeights, gated_delta_rule
from atom_ops.ops.recurrent.recurrent_state import StatePlan, starts_alike
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.shared_memory import fitting_stages
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on

_CHUNK = 64
_FEATURES = 32
_MOST_KEY_FEATURES = 256
_EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _fade(step, a_log, dt_bias):
    """The logarithm of the decay."""
    x = step.to(tl.float32) + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize_on_alignment=["slots", "sources", "starts", "fresh"])
def _one_token_each(
    qkv, gates, a_log, dt_bias, states, slots, sources, fresh, starts, out, qkv_stride, gates_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
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
    read = states + (tl.load(sources + row) * HEADS + head) * (KEY * VALUE)
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    known_EF = inside_EF & (slot >= 0) & (tl.load(fresh + row) == 0)
    state_EF = tl.load(read + at_EF, mask=known_EF, other=0.0) * tl.exp(fade)
    change_F = rate * (v_F - tl.sum(state_EF * k_E[:, None], 0))
    state_EF += k_E[:, None] * change_F[None, :]
    found_F = tl.sum(state_EF * q_E[:, None], 0)
    tl.store(states + at_EF, state_EF, mask=inside_EF & (slot >= 0))
    out += (token * HEADS + head) * VALUE
    tl.store(out + value_F, found_F.to(out.dtype.element_ty), mask=value_F < VALUE)


@triton.jit
def _rows(x, token_C, key_E, stride, inside_C, KEY: tl.constexpr):
    """The tokens' vectors at `x`, and the factors that L2-normalise them."""
    inside_CE = inside_C[:, None] & (key_E < KEY)[None, :]
    x_CE = tl.load(x + token_C[:, None] * stride + key_E[None, :], mask=inside_CE, other=0.0)
    squares_CE = x_CE.to(tl.float32) * x_CE.to(tl.float32)
    return x_CE, tl.rsqrt(tl.sum(squares_CE, 1) + _EPS)


@triton.jit
def _times(x, y, total, PRECISION: tl.constexpr):
    """total + x y, `y` in float32: if `x` is bfloat16, three parts of 8 bits are multiplied exactly."""
    if x.dtype == tl.bfloat16 and PRECISION != "interpreted":
        high = y.to(tl.bfloat16)
        rest = y - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, total)))
    return _dot(x.to(tl.float32), y, total, PRECISION)


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr):
    """total + x y, all float32."""
    precise: tl.constexpr = "ieee" if PRECISION == "interpreted" else PRECISION
    return tl.dot(x, y, total, input_precision=precise)


@triton.jit
def _scores(x_CE, y_CE, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Products of rows."""
    if x_CE.dtype == tl.bfloat16 and PRECISION != "interpreted":
        return tl.dot(x_CE, tl.trans(y_CE))
    zeros_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    return _dot(x_CE.to(tl.float32), tl.trans(y_CE.to(tl.float32)), zeros_CC, PRECISION)


@triton.jit
def _square(matrix, first_row, first_column, rows, stride, SIZE: tl.constexpr):
    """Pointers to a part of a chunk's matrix, and which of its rows the chunk has."""
    row_S = first_row + tl.arange(0, SIZE)
    column_S = first_column + tl.arange(0, SIZE)
    return matrix + row_S[:, None] * stride + column_S[None, :], (row_S < rows)[:, None]


@triton.jit
def _join(matrix, first, rows, stride, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Invert a block [2 SIZE, 2 SIZE] of a unit lower triangular matrix, whose diagonal blocks are inverted.

    [[A, 0], [B, D]]: the inverse has -D' B A' in place of B.
    """
    upper_SS, upper_rows = _square(matrix, first, first, rows, stride, SIZE)
    lower_SS, lower_rows = _square(matrix, first + SIZE, first + SIZE, rows, stride, SIZE)
    left_SS, _ = _square(matrix, first + SIZE, first, rows, stride, SIZE)
    upper = tl.load(upper_SS, mask=upper_rows, other=0.0)
    lower = tl.load(lower_SS, mask=lower_rows, other=0.0)
    left = tl.load(left_SS, mask=lower_rows, other=0.0)
    zeros = tl.zeros([SIZE, SIZE], tl.float32)
    left = _dot(lower, _dot(left, upper, zeros, PRECISION), zeros, PRECISION)
    tl.store(left_SS, -left, mask=lower_rows)


@triton.jit
def _invert(matrix, rows, stride, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + the strictly lower triangular matrix [CHUNK, CHUNK] in memory; it has `rows` rows.

    Blocks of 16 by forward substitution, all at once; then of 32 and so on, from their quarters. These pass
    through memory from thread to thread, hence the barriers.
    """
    block_B = tl.arange(0, CHUNK // 16) * 16
    row_S = tl.arange(0, 16)
    identity_SS = tl.where(row_S[:, None] == row_S[None, :], 1.0, 0.0)
    inverse_BSS = tl.broadcast_to(identity_SS[None, :, :], [CHUNK // 16, 16, 16])
    for at in range(1, 16):
        row_BS = matrix + (block_B + at)[:, None] * stride + block_B[:, None] + row_S[None, :]
        system_BS = tl.load(row_BS, mask=(block_B + at < rows)[:, None], other=0.0)
        known_BS = tl.sum(system_BS[:, :, None] * inverse_BSS, 1)
        inverse_BSS = tl.where((row_S == at)[None, :, None], inverse_BSS - known_BS[:, None, :], inverse_BSS)
    tl.debug_barrier()
    row_BS = block_B[:, None] + row_S[None, :]
    at_BSS = matrix + row_BS[:, :, None] * stride + row_BS[:, None, :]
    tl.store(at_BSS, inverse_BSS, mask=(row_BS < rows)[:, :, None])
    for doubling in tl.static_range(4, CHUNK.bit_length() - 1):
        tl.debug_barrier()
        for first in tl.static_range(0, CHUNK, 2 << doubling):
            _join(matrix, first, rows, stride, 1 << doubling, PRECISION)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=["slots", "starts"])
def _solve_chunks(
    qkv, gates, a_log, dt_bias, slots, starts, solved, asked, factors, qkv_stride, gates_stride, scale,
    tokens, rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, N). What does not depend on the state, of each chunk of the rows with several tokens.

    With the system's inverse L, rates b, decays d since the chunk began, and D of the whole chunk:

    solved [T, N, C]     rows of (D / d) L b, where keys are normalised
    asked [T, N, C]      rows of (q k' d_i / d_j) L b, for j <= i
    factors [3, T, N]    d / |k|, scale d / |q|, and D
    """
    pdl_begin(PDL)
    # Row r has the chunks from starts[r] // CHUNK + r on, of which the next row has none.
    chunk, head = tl.program_id(0), tl.program_id(1)
    row_R = tl.arange(0, BLOCK_R)
    start_R = tl.load(starts + row_R, mask=row_R < rows, other=0)
    row = tl.sum(tl.where((row_R < rows) & (start_R // CHUNK + row_R <= chunk), 1, 0), 0) - 1
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    first = (chunk - start // CHUNK - row) * CHUNK
    if (first >= length) | (length == 1) | (tl.load(slots + row) < 0):
        return
    key_E = tl.arange(0, BLOCK_E)
    earlier_C = tl.arange(0, CHUNK)
    inside_C = first + earlier_C < length
    token_C = (start + first + earlier_C).to(tl.int64)
    queries = qkv + (head // (HEADS // KEY_HEADS)) * KEY
    q_CE, q_unit_C = _rows(queries, token_C, key_E, qkv_stride, inside_C, KEY)
    k_CE, k_unit_C = _rows(queries + KEY_HEADS * KEY, token_C, key_E, qkv_stride, inside_C, KEY)
    gate_C = gates + token_C * gates_stride + head
    rate_C = tl.sigmoid(tl.load(gate_C, mask=inside_C, other=0.0).to(tl.float32))
    fade_C = _fade(
        tl.load(gate_C + HEADS, mask=inside_C, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head)
    )
    fade_C = tl.where(inside_C, fade_C, 0.0)
    since_C = tl.cumsum(fade_C, 0)
    whole = tl.sum(fade_C, 0)
    before_CC = earlier_C[None, :] < earlier_C[:, None]
    seen_CC = earlier_C[None, :] <= earlier_C[:, None]
    kept_CC = tl.exp(tl.where(seen_CC, since_C[:, None] - since_C[None, :], float("-inf")))
    kept_CC *= k_unit_C[None, :]
    alike_CC = _scores(k_CE, k_CE, CHUNK, PRECISION) * kept_CC * (rate_C * k_unit_C)[:, None]
    asked_CC = _scores(q_CE, k_CE, CHUNK, PRECISION) * kept_CC * (q_unit_C * scale)[:, None]

    factors += token_C * HEADS + head
    size = tokens.to(tl.int64) * HEADS
    tl.store(factors, tl.exp(since_C) * k_unit_C, mask=inside_C)
    tl.store(factors + size, tl.exp(since_C) * q_unit_C * scale, mask=inside_C)
    tl.store(factors + 2 * size, tl.zeros_like(since_C) + tl.exp(whole), mask=inside_C)

    place = ((start + first).to(tl.int64) * HEADS + head) * CHUNK
    stride = HEADS * CHUNK
    at_CC, inside_CC = _square(solved + place, 0, 0, length - first, stride, CHUNK)
    tl.store(at_CC, tl.where(before_CC, alike_CC, 0.0), mask=inside_CC)
    tl.debug_barrier()
    _invert(solved + place, length - first, stride, CHUNK, PRECISION)
    solved_CC = tl.load(at_CC, mask=inside_CC, other=0.0) * rate_C[None, :]
    tl.store(at_CC, solved_CC * (tl.exp(whole - since_C) * k_unit_C)[:, None], mask=inside_CC)
    at_CC, inside_CC = _square(asked + place, 0, 0, length - first, stride, CHUNK)
    zeros_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    tl.store(at_CC, _dot(asked_CC, solved_CC, zeros_CC, PRECISION), mask=inside_CC)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots", "starts", "fresh"])
def _pass_states(
    qkv, states, slots, fresh, starts, solved, asked, factors, out, qkv_stride, tokens,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of F, N, R). The rows with several tokens, chunk after chunk; see `_solve_chunks`."""
    pdl_begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (slot < 0) | (length <= 1):
        return
    key_E = tl.arange(0, BLOCK_E)
    earlier_C = tl.arange(0, CHUNK)
    value_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    queries = qkv + (head // (HEADS // KEY_HEADS)) * KEY
    keys = queries + KEY_HEADS * KEY
    values = qkv + 2 * KEY_HEADS * KEY + head * VALUE
    inside_EF = (key_E < KEY)[:, None] & (value_F < VALUE)[None, :]
    states += (slot * HEADS + head) * (KEY * VALUE)
    at_EF = key_E[:, None] * VALUE + value_F[None, :]
    state_EF = tl.load(states + at_EF, mask=inside_EF & (tl.load(fresh + row) == 0), other=0.0)
    factors += head
    size = tokens.to(tl.int64) * HEADS

    for first in range(0, length, CHUNK):
        inside_C = first + earlier_C < length
        token_C = (start + first + earlier_C).to(tl.int64)
        at_CE = token_C[:, None] * qkv_stride + key_E[None, :]
        inside_CE = inside_C[:, None] & (key_E < KEY)[None, :]
        q_CE = tl.load(queries + at_CE, mask=inside_CE, other=0.0)
        k_CE = tl.load(keys + at_CE, mask=inside_CE, other=0.0)
        inside_CF = inside_C[:, None] & (value_F < VALUE)[None, :]
        v_CF = tl.load(values + token_C[:, None] * qkv_stride + value_F[None, :], mask=inside_CF, other=0.0)
        place_CC = (token_C[:, None] * HEADS + head) * CHUNK + earlier_C[None, :]
        solved_CC = tl.load(solved + place_CC, mask=inside_C[:, None], other=0.0)
        asked_CC = tl.load(asked + place_CC, mask=inside_C[:, None], other=0.0)
        past_C = tl.load(factors + token_C * HEADS, mask=inside_C, other=0.0)
        found_C = tl.load(factors + size + token_C * HEADS, mask=inside_C, other=0.0)
        kept = tl.load(factors + 2 * size + (start + first).to(tl.int64) * HEADS)

        zeros_CF = tl.zeros([CHUNK, BLOCK_F], tl.float32)
        wanted_CF = v_CF.to(tl.float32) - _times(k_CE, state_EF, zeros_CF, PRECISION) * past_C[:, None]
        found_CF = _times(q_CE, state_EF, zeros_CF, PRECISION) * found_C[:, None]
        found_CF = _dot(asked_CC, wanted_CF, found_CF, PRECISION)
        left_CF = _dot(solved_CC, wanted_CF, zeros_CF, PRECISION)
        state_EF = _times(tl.trans(k_CE), left_CF, state_EF * kept, PRECISION)
        out_CF = out + (token_C[:, None] * HEADS + head) * VALUE + value_F[None, :]
        tl.store(out_CF, found_CF.to(out.dtype.element_ty), mask=inside_CF)
    tl.store(states + at_EF, state_EF, mask=inside_EF)


def _supports(
    qkv_TC: Tensor, gates_T2N: Tensor, decay: DecayWeights, recurrent_SNEF: Tensor, plan: StatePlan
) -> bool:
    in_order = recurrent_SNEF.is_contiguous() and qkv_TC.stride(1) == gates_T2N.stride(1) == 1
    fits = qkv_TC.is_floating_point() and recurrent_SNEF.shape[2] <= _MOST_KEY_FEATURES
    return in_order and fits and starts_alike(plan)


@gated_delta_rule.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(
    qkv_TC: Tensor, gates_T2N: Tensor, decay: DecayWeights, recurrent_SNEF: Tensor, plan: StatePlan
) -> Tensor:
    heads, key, value = recurrent_SNEF.shape[1:]
    tokens = len(qkv_TC)
    rows = len(plan.slots_R)
    features = min(max(triton.next_power_of_2(value), 16), _FEATURES)
    feature_blocks = triton.cdiv(value, features)
    out_TNF = qkv_TC.new_empty(tokens, heads, value)
    decays = qkv_TC, gates_T2N, decay.a_log_N, decay.dt_bias_N
    strides = qkv_TC.stride(0), gates_T2N.stride(0), key**-0.5
    where = plan.slots_R, plan.fresh_R, plan.query_starts_R1
    heads_of_keys = {
        "KEY_HEADS": (qkv_TC.shape[1] - heads * value) // (2 * key),
        "HEADS": heads,
        "KEY": key,
        "BLOCK_E": max(triton.next_power_of_2(key), 16),
        **launch_options(qkv_TC.device),
    }
    sizes = heads_of_keys | {"VALUE": value, "BLOCK_F": features}
    single = plan.max_query_len == 1
    _one_token_each[(rows, heads, feature_blocks)](
        *decays, recurrent_SNEF, plan.slots_R, plan.starts_from_R, plan.fresh_R, plan.query_starts_R1,
        out_TNF, *strides, ALL=single, num_warps=4, **sizes,
    )  # fmt: skip
    if single:
        return out_TNF
    chunks = {"CHUNK": _CHUNK, "PRECISION": _precision()}
    solved_TNC, asked_TNC = qkv_TC.new_empty(2, tokens, heads, _CHUNK, dtype=torch.float32)
    factors_3TN = qkv_TC.new_empty(3, tokens, heads, dtype=torch.float32)
    _solve_chunks[(tokens // _CHUNK + rows, heads)](
        *decays, plan.slots_R, plan.query_starts_R1, solved_TNC, asked_TNC, factors_3TN, *strides,
        tokens, rows, BLOCK_R=triton.next_power_of_2(rows), num_warps=4, **chunks, **heads_of_keys,
    )  # fmt: skip
    _pass_states[(feature_blocks, heads, rows)](
        qkv_TC, recurrent_SNEF, *where, solved_TNC, asked_TNC, factors_3TN, out_TNF, qkv_TC.stride(0), tokens,
        num_warps=4, num_stages=_stages(qkv_TC, heads_of_keys["BLOCK_E"], features), **chunks, **sizes,
    )  # fmt: skip
    return out_TNF


def _stages(qkv_TC: Tensor, block_key: int, block_value: int) -> int:
    """Stages of `_pass_states` that fit; its states pass through shared memory, too."""
    if torch.version.hip is not None:
        return 1
    stage = _CHUNK * ((2 * block_key + block_value) * qkv_TC.element_size() + 2 * _CHUNK * 4)
    return fitting_stages(2, stage, qkv_TC.device, (block_key + _CHUNK) * block_value * 4)


def _precision() -> str:
    """How float32 is multiplied: on NVIDIA by three products of tensor cores, which are as accurate."""
    if INTERPRETED:
        return "interpreted"
    return "ieee" if torch.version.hip is not None else "tf32x3"
