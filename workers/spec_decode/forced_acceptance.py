"""Forced acceptance, for benchmarks: how many drafts a step accepts is drawn, whatever the model samples.

With random weights a model's drafts are never right, so the speed of speculation could not be measured. Here
a step accepts as many as trained weights would: on average `length` - 1, each time one of the two nearest
whole numbers, and at most the drafts that it has. The accepted drafts become the text, so positions,
caches and the next drafts are what they would be after real acceptance.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from atom_ops import NO_DRAFT, to_device
from workers.spec_decode.draft_rows import DraftRows

_PERIOD = 1 << 16
_STRIDE = 7919
"""Rows begin at different places of the period."""
_SEED = 20


class ForcedAcceptance:
    """A number of drafts for each batch row and position: the same in every run."""

    def __init__(self, length: float, device: torch.device):
        """`length`: mean tokens of a step, at least 1."""
        counts = np.full(_PERIOD, math.floor(length - 1), np.int64)
        counts[: round((length - 1) % 1 * _PERIOD)] += 1
        np.random.default_rng(_SEED).shuffle(counts)
        self._counts_P = to_device(counts, device)

    def apply(self, drafts: DraftRows, ids_S: torch.Tensor) -> tuple[DraftRows, torch.Tensor]:
        """The accepted drafts alone, and the sampled ids (int64 [S]) with them in their places.

        Does not wait for the device; a graph may capture it.
        """
        places_R = (drafts.rows_R * _STRIDE + drafts.first_positions_R) % _PERIOD
        accepted_R1 = self._counts_P.index_select(0, places_R)[:, None]
        number_K = torch.arange(drafts.drafts_RK.shape[1], device=ids_S.device)
        kept = replace(drafts, drafts_RK=drafts.drafts_RK.masked_fill(number_K >= accepted_R1, NO_DRAFT))
        draft_S = kept.next_drafts_S
        return kept, torch.where(draft_S == NO_DRAFT, ids_S, draft_S)
