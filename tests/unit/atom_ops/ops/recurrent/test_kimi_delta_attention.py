"""Kimi delta attention of rows, whole and in pieces, against transformers' function for one sequence."""

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from atom_ops import DecayWeights, kimi_delta_attention, plan_states

CPU = torch.device("cpu")
HEADS, KEY, VALUE = 3, 16, 12
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = (50, 3, 32, 1)
QKV, STEPS, RATES = (
    [torch.randn(length, width, generator=GENERATOR) for length in LENGTHS]
    for width in (HEADS * (2 * KEY + VALUE), HEADS * KEY, HEADS)
)
DT_BIAS = torch.randn(HEADS * KEY, generator=GENERATOR)


def theirs(row: int, decay: DecayWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state of one sequence."""
    sizes = [HEADS * KEY, HEADS * KEY, HEADS * VALUE]
    q, k, v = (part.unflatten(1, (HEADS, -1))[None] for part in QKV[row].split(sizes, 1))
    opened = torch.nn.functional.softplus(STEPS[row] + decay.dt_bias_N).unflatten(1, (HEADS, KEY))
    fade = -decay.a_log_N.exp()[:, None] * opened
    out, state = recurrent_kimi_delta_attention(
        q, k, v, g=fade[None], beta=RATES[row].sigmoid()[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[0], state[0]


@pytest.mark.parametrize("a_log", [-2.0, 3.0], ids=["slow", "fast"])
@pytest.mark.parametrize("pieces", [[50], [17, 16, 17], [1] * 50, [33] + [1] * 17])
def test_rows_in_pieces_match_transformers(pieces: list[int], a_log: float) -> None:
    """All rows begin together; those that have ended leave the batch. Fast decays forget all at once."""
    decay = DecayWeights(torch.full((HEADS,), a_log), DT_BIAS)
    states = torch.full((6, HEADS, KEY, VALUE), torch.nan)
    slots = np.array([5, 0, 3, 1])
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    done = 0
    for piece in pieces:
        rows = [row for row, length in enumerate(LENGTHS) if length > done]
        counts = [min(piece, LENGTHS[row] - done) for row in rows]
        fresh = np.full(len(rows), done == 0)
        plan = plan_states(np.array(counts, np.int32), slots[rows], fresh, CPU)
        given = (
            torch.cat([each[row][done : done + count] for row, count in zip(rows, counts, strict=True)])
            for each in (QKV, STEPS, RATES)
        )
        out = kimi_delta_attention(*given, decay, states, plan)
        for row, part in zip(rows, out.split(counts), strict=True):
            found[row].append(part)
        done += piece
    for row, slot in enumerate(slots):
        wanted, state = theirs(row, decay)
        torch.testing.assert_close(torch.cat(found[row]), wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[slot], state, atol=1e-5, rtol=1e-4)
    assert states[[2, 4]].isnan().all(), "slots of no request"
