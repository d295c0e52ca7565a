"""Recurrent states of rows with drafts: one after each token of a step, so that rejected ones are forgotten.

    state after    last id   draft 1   draft 2   draft 3        K = 3: a slot has room for 1 + K states
    place          0         1         2         3
                             accepted  rejected                 the next step begins from place 1

A step computes the last id from the state after the last accepted token, and writes its own to place 0; the
first draft from there, to place 1; and so on. So each token is computed as in a step without drafts, by the
same kernel, and its state is the plain run's. Which place a row begins from is known on the device alone.
Prompts are computed at place 0 in one part.

A model that drafts has such states of its own. It also computes its drafts, and must not change the state
that the next step begins from. So their states are at the place after that one, where each overwrites the
one before:

    predict       last id   draft 1   draft 2              drafts p, p+1 and p+2 come after these
    from place    1         2         2
    to place      2         2         2

Slots here are those of the cache, 1 + K for each slot of the engine core.
"""

from dataclasses import replace

import numpy as np
import torch

from atom_ops import StatePart, StatePlan, plan_states, to_device
from workers.batch.group_rows import Rows, StepRows


def draft_states(step: StepRows, slots: Rows, places: int, accepted_N: torch.Tensor) -> StatePlan:
    """The plan of a step of these rows, with a slot of the engine core for each.

    `accepted_N` (int64): accepted drafts of each batch row's last step.
    """
    first = slots * places
    is_fresh = step.ends == step.counts
    plan = plan_states(step.counts.astype(np.int32), first, is_fresh, step.device)
    if not step.decodes.any():
        return plan
    if not step.counts.any():  # such rows are padding
        return replace(plan, slots_R=torch.full_like(plan.slots_R, -1))
    begins = step.counts.cumsum() - step.counts
    parts = []
    prompts = np.flatnonzero(~step.decodes)
    if len(prompts):
        counts = step.counts[prompts]
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        tokens = begins[prompts].repeat(counts) + inside
        own = plan_states(counts.astype(np.int32), first[prompts], is_fresh[prompts], step.device)
        parts.append(StatePart(to_device(tokens, step.device), own))
    decodes = np.flatnonzero(step.decodes)
    for place in range(int(step.counts[decodes].max())):
        those = decodes[step.counts[decodes] > place]
        ones = np.ones(len(those), np.int32)
        targets = first[those] + place
        tokens_P, targets_R, rows_R = to_device(
            np.stack((begins[those] + place, targets, step.rows[those])), step.device
        )
        begun_R = accepted_N.index_select(0, rows_R) if place == 0 else -1
        own = plan_states(ones, targets, np.zeros(len(those), np.bool_), step.device)
        parts.append(StatePart(tokens_P, replace(own, sources_R=targets_R + begun_R)))
    return replace(plan, parts=parts)


def captured_draft_states(
    slots_R: torch.Tensor, accepted_R: torch.Tensor, places: int, tokens_per_row: int, starts_R1: torch.Tensor
) -> StatePlan:
    """The plan of decoding rows with as many tokens each; a slot of -1 is padding.

    `accepted_R` (int64): accepted drafts of the rows' last step. `starts_R1` (int32): 0 … R.
    """
    rows = len(slots_R)
    real_R = slots_R >= 0
    none_R = torch.zeros_like(real_R)
    first_R = slots_R * places
    tokens_R = torch.arange(rows, device=slots_R.device) * tokens_per_row
    parts = []
    for place in range(tokens_per_row):
        targets_R = torch.where(real_R, first_R + place, -1)
        begun_R = first_R + (accepted_R if place == 0 else place - 1)
        sources_R = torch.where(real_R, begun_R, -1)
        own = StatePlan(targets_R, none_R, starts_R1, num_tokens=rows, max_query_len=1, sources_R=sources_R)
        parts.append(StatePart(tokens_R + place, own))
    plan = StatePlan(
        torch.where(real_R, first_R, -1),
        none_R,
        starts_R1 * tokens_per_row,
        num_tokens=rows * tokens_per_row,
        max_query_len=tokens_per_row,
    )
    return replace(plan, parts=parts)


def predicting_states(
    slots_R: torch.Tensor, accepted_R: torch.Tensor, places: int, is_first: bool, on_host: bool
) -> StatePlan:
    """The plan of one token of each row after those of its last step; a slot of -1 is padding.

    `accepted_R` (int64): accepted drafts of the step. `is_first`: whether it is the first token since; it
    begins from the state that the next step begins from, too. `on_host`: whether the rows are on the host.
    """
    rows = len(slots_R)
    device = slots_R.device
    first_R = slots_R * places
    targets_R = first_R + (accepted_R + 1) % places
    sources_R = first_R + accepted_R if is_first else targets_R
    none_R = torch.zeros_like(slots_R, dtype=torch.bool)
    return StatePlan(
        torch.where(slots_R >= 0, targets_R, -1),
        none_R,
        torch.arange(rows + 1, dtype=torch.int32, device=device),
        num_tokens=rows,
        max_query_len=1,
        query_lens=np.ones(rows, np.int32) if on_host else None,
        sources_R=torch.where(slots_R >= 0, sources_R, -1),
    )
