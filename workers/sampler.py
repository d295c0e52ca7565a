"""How every row draws: its settings, kept between steps, and the draw itself.

R rows that draw in a step, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.engine import Sampling
from atom_ops import SamplingBatch, sample


class Sampler:
    """One column for each sampling setting, one entry for each row of the persistent batch."""

    def __init__(self, max_rows: int, device: torch.device):
        self._device = device
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seed = np.zeros(max_rows, np.uint64)
        self._choice = np.zeros(max_rows, np.int64)
        self._gathered_rows: NDArray[np.int64] | None = None

    def set_row(self, row: int, sampling: Sampling) -> None:
        """A new request draws in `row`."""
        self._gathered_rows = None
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._choice[row] = sampling.choice

    def draw(
        self, logits_RV: torch.Tensor, rows: NDArray[np.int64], positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Ids, int64 [R]; `positions_R` are the indices that they will have in their sequences.

        Passing the same `rows` array again saves gathering its settings again.
        """
        if rows is not self._gathered_rows:
            self._gathered_rows, self._gathered = rows, self._gather(rows)
        return sample(logits_RV, self._gathered, positions_R)

    def _gather(self, rows: NDArray[np.int64]) -> SamplingBatch:
        return SamplingBatch.from_host(
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            self._seed[rows],
            self._choice[rows],
            self._device,
        )
