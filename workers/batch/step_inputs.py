"""What a step takes: the applied batch on the host, the inputs of the forward pass and of sampling.

T tokens of a step, R sampling rows, P tokens with prompt log probabilities.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_ops import StatePlan
from workers.batch.group_rows import Rows
from workers.layers.context import GroupContext, ImageTokens
from workers.spec_decode.draft_rows import DraftRows


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of one step that sample a token."""

    rows: Rows
    """On the host; the same array object as long as the same rows decode."""
    rows_R: torch.Tensor
    tokens_R: torch.Tensor
    """Index, among the step's tokens, of each row's last token."""
    positions: Rows
    """Index of each sampled token in its sequence, on the host."""
    positions_R: torch.Tensor
    drafts: DraftRows | None = None
    """With speculation: the rows of these tokens. `rows` then has each row once for each token."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one row whose next tokens are prompt tokens, too."""

    row: int
    start: int
    """Position of the first of the next tokens."""
    count: int


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """The tokens of one step whose next prompt tokens get log probabilities; P tokens in all."""

    chunks: list[PromptChunk]
    """In the order of their tokens."""
    tokens_P: torch.Tensor
    """Index among the step's tokens."""
    next_ids_P: torch.Tensor
    top: int
    """The largest number of top tokens that one of the rows requests."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the forward pass and the sampler for one step, on the device."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    groups: list[GroupContext | StatePlan]
    sampling: SamplingRows | None
    prompt_logprobs: PromptLogprobRows | None = None
    next_ids_T: torch.Tensor | None = None
    """int64: the id after each token of a prompt, as far as it is known; None unless it is wanted."""
    rope: torch.Tensor | None = None
    """RoPE positions, [T] or by axis [3, T]; None: `positions_T`."""
    images: ImageTokens | None = None
    """The tokens in images; with them `rope` is by axis, and the step is eager."""
    next_images: ImageTokens | None = None
    """Tokens whose next one is in an image, as far as the step has that one too, with its features."""

    @property
    def rope_positions(self) -> torch.Tensor:
        """What the model's RoPE takes."""
        return self.positions_T if self.rope is None else self.rope


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """A batch whose changes are applied, as columns in batch order: what every part of the step takes."""

    rows: Rows
    starts: Rows
    """Computed tokens of each row before the step; with drafts in flight an upper bound."""
    counts: Rows
    """Tokens that each row computes; with drafts some may be padding."""
    decodes: NDArray[np.bool_]
    """Whether the row decodes; the others compute prompt tokens."""
    num_drafts: int
    is_uniform: bool
    """Whether all rows decode the same number of tokens, which the host knows."""
    token_ids: bytes = b""
    """Prompt tokens to compute, packed int32."""
    next_ids: bytes = b""
    """The prompt token after each chunk with prompt log probabilities, packed int32."""


@dataclass(frozen=True, slots=True)
class UniformDecode:
    """Rows that all decode; reused until a row joins or leaves. S = R * (1 + drafts) tokens."""

    row_list: list[int]
    num_drafts: int
    rows: Rows
    """[R]."""
    counts: Rows
    """[R]: 1 + drafts."""
    decodes: NDArray[np.bool_]
    """[R]: True."""
    rows_R: torch.Tensor
    token_rows: Rows
    """[S]: the row of each token; the same object as long as the same rows decode."""
    tokens_S: torch.Tensor
    """0 … S - 1."""
