"""Where the images of the batch's rows are, and the positions that RoPE has because of them.

By axis, an image of r x c tokens takes as many positions as its longer side: its tokens have the position of
the first one in time, and their own in row and column. What follows an image is closer than its index says:

    index           0 1 2 | 3 4 5 6 7 8 | 9 10        an image of 2 x 3 tokens
    time            0 1 2 | 3 3 3 3 3 3 | 6 7
    row             0 1 2 | 3 3 3 4 4 4 | 6 7
    column          0 1 2 | 3 4 5 3 4 5 | 6 7
    offset          0       0             -3          of tokens that are not in an image

Other models have indices as positions. Where tokens of an image see each other, a step computes all of them:

    ahead           0 0 0 | 5 4 3 2 1 0 | 0 0         tokens after its own that each sees

T tokens of a step, M of them in images, N rows of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import RowImage
from atom.shared.messages.worker import NewRow
from atom_ops import to_device
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import Rows
from workers.layers.context import ImageTokens

Features = Callable[[bytes], torch.Tensor]
"""The features [tokens, L, D] of the image with a key."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step on the host, row by row."""

    rows: Rows
    starts: Rows
    counts: Rows
    past_tokens: Rows
    """The step's tokens before the row's."""


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Inputs of a step that images change."""

    positions: torch.Tensor
    """Those of RoPE, int64: [T], or [3, T] by axis with tokens in images."""
    tokens: ImageTokens | None
    """None without tokens in images."""
    next_tokens: ImageTokens | None
    """The features of the tokens after some of the step's, as far as the step has these too."""


class _Places:
    """The images of one row, in order."""

    def __init__(self, images: Sequence[RowImage], by_axis: bool):
        self.images = images
        self.starts = np.array([image.start for image in images])
        self.ends = np.array([image.start + image.rows * image.columns for image in images])
        saved = [
            max(image.rows, image.columns) - image.rows * image.columns if by_axis else 0 for image in images
        ]
        self.offsets = np.concatenate(([0], np.cumsum(saved)))
        """Before the first image, and after each."""

    def between(self, start: int, end: int) -> range:
        """Numbers of the images with tokens at positions start .. end - 1."""
        if start >= end:
            return range(0)
        first = int(np.searchsorted(self.ends, start, side="right"))
        return range(first, int(np.searchsorted(self.starts, end, side="left")))


class ImageRows:
    """The images of each row of the batch."""

    def __init__(
        self, limits: BatchLimits, device: torch.device, features: Features, settings: ImageSettings
    ):
        self._settings = settings
        self._device = device
        self._features = features
        self._places: dict[int, _Places] = {}
        self._offsets = np.zeros(limits.max_rows + 1, np.int64)
        self.offsets_N = torch.zeros(limits.max_rows + 1, dtype=torch.int64, device=device)
        """RoPE position minus index of the tokens that each row generates; also of the padding row."""

    def admit(self, new: NewRow) -> None:
        """Take over the images of a new request."""
        self._places.pop(new.row, None)
        offset = 0
        if new.images:
            self._places[new.row] = places = _Places(new.images, self._settings.by_axis)
            offset = int(places.offsets[-1])
        if offset != self._offsets[new.row]:
            self._offsets[new.row] = offset
            self.offsets_N[new.row] = offset

    def prefills(self, rows: Rows, decodes: NDArray[np.bool_]) -> bool:
        """Whether a row with images computes tokens of its prompt."""
        return any(row in self._places for row in rows[~decodes].tolist()) if self._places else False

    def any(self, rows: Rows) -> bool:
        """Whether RoPE positions of tokens that these rows generate differ from their indices."""
        return bool(self._offsets[rows].any())

    def positions(self, positions_S: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """RoPE positions [S] of tokens that R rows generate, each the same number of them."""
        if not self._settings.by_axis:
            return positions_S
        offsets_R = self.offsets_N.index_select(0, rows_R)
        return (positions_S.view(len(rows_R), -1) + offsets_R[:, None]).view(-1)

    def ahead(self, step: StepTokens) -> NDArray[np.int32] | None:
        """Tokens after its own that each token of a step sees; None: none.

        Raises ValueError for a step that would compute a part of such an image.
        """
        if not self._settings.sees_ahead or not self._places:
            return None
        ahead = None
        for index, row in enumerate(step.rows.tolist()):
            if (places := self._places.get(row)) is None:
                continue
            start, count = int(step.starts[index]), int(step.counts[index])
            for number in places.between(start, start + count):
                if ahead is None:
                    ahead = np.zeros(int(step.counts.sum()), np.int32)
                image, end = places.images[number], int(places.ends[number])
                if image.start < start or end > start + count:
                    raise ValueError(
                        f"a step computes tokens {start} to {start + count} of a row, and cuts its image at "
                        f"{image.start} to {end}"
                    )
                first = int(step.past_tokens[index]) + image.start - start
                ahead[first : first + end - image.start] = np.arange(end - image.start)[::-1]
        return ahead

    def inputs(self, step: StepTokens, positions_T: torch.Tensor) -> ImageInputs | None:
        """The inputs of a step that images change; None: none. `positions_T` are the indices, on the device.

        Raises KeyError for an image whose features were not computed.
        """
        affected = [index for index, row in enumerate(step.rows.tolist()) if row in self._places]
        if not affected:
            return None
        offsets = np.zeros(len(positions_T), np.int64)
        found = _Found([], [], [], [])
        for index in affected:
            places = self._places[int(step.rows[index])]
            first, start = int(step.past_tokens[index]), int(step.starts[index])
            count = int(step.counts[index])
            passed = np.searchsorted(places.ends, np.arange(start, start + count), side="right")
            offsets[first : first + count] = places.offsets[passed]
            for number in places.between(start, start + count):
                image = places.images[number]
                low, high = max(start, image.start), min(start + count, int(places.ends[number]))
                position = image.start + int(places.offsets[number])
                part = slice(low - image.start, high - image.start)
                found.add(image, position, part, first + low - start, low > start)
        rope = positions_T + self._upload(offsets) if self._settings.by_axis else positions_T
        if not found.keys:
            return ImageInputs(rope, None, None)
        columns = np.concatenate(found.columns, axis=1)
        tokens_M, *axes = self._upload(columns)
        if self._settings.by_axis:
            rope = rope.repeat(3, 1)
            rope[:, tokens_M] = torch.stack(axes)
        parts = [self._features(key)[part] for key, part in zip(found.keys, found.parts, strict=True)]
        tokens = ImageTokens(tokens_M, torch.cat(parts))
        followers = np.concatenate(found.follow).nonzero()[0]
        follow_M = self._upload(followers)
        next_tokens = ImageTokens(
            tokens_M.index_select(0, follow_M) - 1, tokens.features_MLD.index_select(0, follow_M)
        )
        return ImageInputs(rope, tokens, next_tokens)

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return to_device(numbers, self._device)


@dataclass(frozen=True, slots=True)
class _Found:
    """The parts of images that a step computes."""

    keys: list[bytes]
    parts: list[slice]
    """Which of the image's tokens."""
    columns: list[NDArray[np.int64]]
    """Index in the step, then position in time, row and column [4, tokens]."""
    follow: list[NDArray[np.bool_]]
    """Whether each token follows another one of its row in the step."""

    def add(self, image: RowImage, position: int, part: slice, token: int, follows: bool) -> None:
        """Add a part that begins at a token of the step, of an image that begins at a RoPE position.

        `follows`: whether that token follows another one of its row in the step.
        """
        self.keys.append(image.key)
        self.parts.append(part)
        numbers = np.arange(part.start, part.stop)
        rows, columns = position + numbers // image.columns, position + numbers % image.columns
        tokens = token + numbers - part.start
        self.columns.append(np.stack((tokens, np.full_like(numbers, position), rows, columns)))
        self.follow.append((numbers > part.start) | follows)
