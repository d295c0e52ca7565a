"""The convolution and the gated delta rule of rows, against transformers' functions for one sequence."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from atom_ops import (
    DecayWeights,
    StatePlan,
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
    make_state_layer,
    plan_states,
    triton_impl,
)
from atom_ops.ops.recurrent.recurrent_state import StateShape
from atom_ops.triton_impl.hardware import target

CPU = torch.device("cpu")
KEY_HEADS, HEADS, KEY, VALUE, TAPS = 2, 6, 16, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
SHAPE = StateShape(CHANNELS, TAPS, HEADS, KEY, VALUE, torch.float32)
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = (150, 3, 64, 1)
TEXTS = [torch.randn(length, CHANNELS, generator=GENERATOR) for length in LENGTHS]
GATES = [torch.randn(length, 2 * HEADS, generator=GENERATOR) for length in LENGTHS]
WEIGHT = torch.randn(CHANNELS, TAPS, generator=GENERATOR)
DECAY = DecayWeights(torch.randn(HEADS, generator=GENERATOR) - 1, torch.randn(HEADS, generator=GENERATOR))


def theirs_conv(x_TC: torch.Tensor) -> torch.Tensor:
    return causal_conv1d_fn(x_TC.T[None], WEIGHT, activation="silu")[0].T


def theirs_rule(x_TC: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = [KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE]
    q, k, v = (
        part.unflatten(1, (-1, size))[None]
        for part, size in zip(x_TC.split(sizes, 1), (KEY, KEY, VALUE), strict=True)
    )
    rate, step = gates.chunk(2, 1)
    fade = -DECAY.a_log_N.exp() * torch.nn.functional.softplus(step + DECAY.dt_bias_N)
    out, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=fade[None],
        beta=rate.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0]


def steps(chunks: list[list[int]]) -> Any:
    """Row i's tokens by step: (plan, ranges of tokens by row); slots are out of order."""
    slots, done = np.array([5, 0, 3, 1]), [0] * len(LENGTHS)
    for step in range(max(map(len, chunks))):
        rows = [row for row, counts in enumerate(chunks) if step < len(counts)]
        counts = np.array([chunks[row][step] for row in rows], np.int32)
        fresh = np.array([done[row] == 0 for row in rows])
        ranges = {
            row: slice(done[row], done[row] + int(count)) for row, count in zip(rows, counts, strict=True)
        }
        for row, taken in ranges.items():
            done[row] = taken.stop
        yield plan_states(counts, slots[rows], fresh, CPU), ranges
    assert done == list(LENGTHS)


PIECES = {
    "whole": [[150], [3], [64], [1]],
    "chunks": [[64, 64, 22], [2, 1], [1, 63], [1]],
    "tokens": [[1] * length for length in LENGTHS],
    "prompts and decodes": [[20] + [1] * 130, [1, 1, 1], [64], [1]],
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_rows_in_chunks_match_transformers(name: str, host: bool) -> None:
    states = make_state_layer(6, SHAPE, CPU)
    states.conv.fill_(torch.nan)
    states.recurrent.fill_(torch.nan)
    mixed: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for plan, ranges in steps(PIECES[name]):
        plan = plan if host else replace(plan, query_lens=None)
        x = torch.cat([TEXTS[row][taken] for row, taken in ranges.items()])
        gates = torch.cat([GATES[row][taken] for row, taken in ranges.items()])
        conv = causal_conv(x, WEIGHT, states.conv, plan)
        out = gated_delta_rule(conv, gates, DECAY, states.recurrent, plan)
        counts = [taken.stop - taken.start for taken in ranges.values()]
        for row, row_conv, row_out in zip(ranges, conv.split(counts), out.split(counts), strict=True):
            mixed[row].append(row_conv)
            found[row].append(row_out)
    for row, slot in enumerate((5, 0, 3, 1)):
        wanted_conv = theirs_conv(TEXTS[row])
        wanted, state = theirs_rule(wanted_conv, GATES[row])
        torch.testing.assert_close(torch.cat(mixed[row]), wanted_conv, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat(found[row]), wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states.recurrent[slot], state, atol=1e-5, rtol=1e-4)
    assert states.conv[[2, 4]].isnan().all() and states.recurrent[[2, 4]].isnan().all(), "slots of no request"


@pytest.mark.parametrize("provider", ["torch", "triton"])
@pytest.mark.parametrize("chunks", ["chunks", "tokens"])
def test_padding_of_a_captured_step_changes_no_slot(chunks: str, provider: str) -> None:
    """Three rows without a slot, and tokens after the last row's."""
    if provider == "triton":
        if not target.runs_on(CPU):
            pytest.skip("needs a GPU or the interpreter")
        triton_impl.load()
    conv, rule = (op.providers[provider].function for op in (causal_conv, gated_delta_rule))
    plan, ranges = next(steps(PIECES[chunks]))
    x = torch.cat([TEXTS[row][taken] for row, taken in ranges.items()])
    gates = torch.cat([GATES[row][taken] for row, taken in ranges.items()])
    alone, padded = make_state_layer(6, SHAPE, CPU), make_state_layer(6, SHAPE, CPU)
    padding = 1 if chunks == "tokens" else 0  # a captured decode has a token in every row
    wider = padded_plan(plan, rows=3, padding=padding, tokens=3 * padding or 7)
    more_x, more_gates = (
        torch.cat((a, torch.full((wider.num_tokens - len(a), a.shape[1]), torch.nan))) for a in (x, gates)
    )
    wanted, found = (
        rule(conv(x_TC, WEIGHT, states.conv, given), more, DECAY, states.recurrent, given)
        for states, given, x_TC, more in ((alone, plan, x, gates), (padded, wider, more_x, more_gates))
    )
    torch.testing.assert_close(found[: len(x)], wanted)
    torch.testing.assert_close(padded.conv, alone.conv)
    torch.testing.assert_close(padded.recurrent, alone.recurrent)


def padded_plan(plan: StatePlan, rows: int, padding: int, tokens: int) -> StatePlan:
    """`padding` tokens in each row without a slot, of `tokens` more in all."""
    return StatePlan(
        torch.cat((plan.slots_R, plan.slots_R.new_full((rows,), -1))),
        torch.cat((plan.fresh_R, plan.fresh_R.new_zeros(rows))),
        torch.cat(
            (
                plan.query_starts_R1,
                plan.query_starts_R1[-1] + padding * torch.arange(1, rows + 1, dtype=torch.int32),
            )
        ),
        num_tokens=plan.num_tokens + tokens,
        max_query_len=1 if padding else plan.max_query_len + tokens,
    )


def test_the_gated_norm_matches_transformers() -> None:
    norm = Qwen3NextRMSNormGated(VALUE, eps=1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x, gate = torch.randn(2, 9, VALUE, generator=GENERATOR)
    torch.testing.assert_close(gated_rms_norm(x, gate, norm.weight.data, 1e-5), norm(x, gate).detach())
