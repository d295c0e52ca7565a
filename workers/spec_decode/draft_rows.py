"""The sampling rows of a step with drafts, and what verification finds."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from atom_ops import NO_DRAFT, SamplingBatch
from workers.batch.group_rows import Rows
from workers.layers.context import ForwardContext, ImageTokens


@dataclass(frozen=True, slots=True)
class DraftRows:
    """R sampling rows of up to K drafts each: S sampled tokens, one after each row's last token and
    one after each of its drafts."""

    rows: Rows
    """[R], on the host."""
    decoded: NDArray[np.bool_]
    """[R]: whether the row decodes; the others sample the token after their prompt."""
    rows_R: torch.Tensor
    first_positions_R: torch.Tensor
    """int64: position of the first sampled token; -1 for a row at its limit, whose samples are not used."""
    drafts_RK: torch.Tensor
    """int64: the drafts; `NO_DRAFT` for padding."""
    row_indices: Rows
    """[S], on the host: the index of each sampled token's row among the R rows."""
    num_before: Rows
    """[S], on the host: how many drafts come before each sampled token."""
    places_S: torch.Tensor | None
    """int64: row index * (1 + K) + drafts before; None: S is R * (1 + K), in order."""

    @property
    def indices_S(self) -> torch.Tensor:
        """int64: `row_indices` on the device."""
        width = 1 + self.drafts_RK.shape[1]
        if self.places_S is not None:
            return self.places_S // width
        # Not an expanded view: of one row that has a stride of 0, which kernels would misread.
        return torch.arange(len(self.rows_R), device=self.rows_R.device).repeat_interleave(width)

    @property
    def next_drafts_S(self) -> torch.Tensor:
        """int64: the draft at the position of each sampled token; `NO_DRAFT` where there is none."""
        next_RJ = functional.pad(self.drafts_RK, (0, 1), value=NO_DRAFT)
        return next_RJ.flatten() if self.places_S is None else next_RJ.flatten()[self.places_S]

    def by_row(self, ids_S: torch.Tensor) -> torch.Tensor:
        """The sampled ids as [R, 1 + K]; 0 where nothing is sampled."""
        width = 1 + self.drafts_RK.shape[1]
        if self.places_S is None:
            return ids_S.view(-1, width)
        ids = ids_S.new_zeros(len(self.rows) * width)
        return ids.index_copy_(0, self.places_S, ids_S).view(-1, width)


@dataclass(frozen=True, slots=True)
class Computed:
    """The T tokens that a forward pass has computed; some may be padding, without a slot."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    hidden_TD: torch.Tensor
    """Final hidden states."""
    context: ForwardContext
    next_ids_T: torch.Tensor | None = None
    """int64: the id after each token of a prompt, as far as it is known. Fewer than T without padding; None:
    all tokens are the last ones, or drafts, of decoding rows."""
    rope_T: torch.Tensor | None = None
    """Positions of RoPE, [T], or [3, T] by axis; None: `positions_T`."""
    next_images: ImageTokens | None = None
    """Tokens whose next one is in an image, with its features."""

    @property
    def rope_positions(self) -> torch.Tensor:
        return self.positions_T if self.rope_T is None else self.rope_T


@dataclass(frozen=True, slots=True)
class Sampled:
    """The S tokens that R rows have sampled after `Computed`."""

    drafts: DraftRows
    ids_S: torch.Tensor
    tokens_S: torch.Tensor
    """int64: index, among the computed tokens, of the one before each sampled token."""
    counts_R: torch.Tensor
    """int64: see `Verified`."""
    settings: SamplingBatch
    """Sampling settings of the R rows, without logits processors."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The S sampled tokens of a step, before verification; fields as in `Sampled`."""

    computed: Computed
    ids_S: torch.Tensor
    tokens_S: torch.Tensor
    settings: SamplingBatch | None
    """None unless a model drafts."""


@dataclass(frozen=True, slots=True)
class Verified:
    """How far each of R rows advances in a step."""

    counts_R: torch.Tensor
    """int64: sampled tokens that are the row's, 1 to 1 + K."""
    proposed_R: torch.Tensor
    """int64: drafts that were verified."""
    ids_S: torch.Tensor
    """int64: the rows' tokens, up to their counts: the sampled ones, unless acceptance is forced."""
