"""A forward pass captured in pieces: a graph for each run of kernels between two token mixers.

    captured   embedding, norm, QKV  │  output projection, MLP, norm, QKV  │ …  │ …, norm
    eager                         attention                            attention

Attention runs kernel by kernel, with the step's own plan, so it chooses its kernels by the step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from workers.graphs.graph_recorder import Replay
from workers.layers.attention.rotation import Rotation
from workers.layers.context import ForwardContext, Mixing

ReplayPiecewise = Callable[[ForwardContext], None]
"""Computes the pass with the plans of a step, whose tensors are as long as the captured ones."""


class Capture(Protocol):
    """Captures of one device, as `GraphRecorder` and `CallRecorder` make them."""

    def capturing(self) -> AbstractContextManager[None]: ...

    def begin(self) -> None: ...

    def end(self) -> Replay: ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor: ...


class MixerOutputs:
    """Buffers for the results of token mixers.

    The piece after a mixer reads its buffer before the next mixer writes, so one buffer for each shape of a
    token serves every pass: make the largest pass first.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def like(self, result: torch.Tensor) -> torch.Tensor:
        """The buffer for results of this shape."""
        key = result.shape[1:], result.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(result, memory_format=torch.contiguous_format)
        return self._buffers[key][: len(result)]


@dataclass(frozen=True, slots=True)
class _Mixer:
    """A token mixer between two pieces."""

    compute: Mixing
    tensors: Sequence[torch.Tensor]
    """Not owned: the pieces after it may reuse their memory."""
    out: torch.Tensor
    rotation: int
    """Number of its rotation among those of the pass."""


class PiecewiseRecorder:
    """Captures forward passes in pieces; implements `Splitter` for the one that it captures."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self._outputs = MixerOutputs()
        self._pieces: list[Replay] = []
        self._mixers: list[_Mixer] = []
        self._rotations: list[Rotation] = []

    def __call__(self, body: Callable[[ForwardContext], None], context: ForwardContext) -> ReplayPiecewise:
        """Capture `body`, a forward pass that leaves its result in a buffer; `context` is of a step."""
        body(context)  # compiles kernels and initialises libraries outside the capture
        self._pieces = []
        self._mixers = []
        self._rotations = []
        with self._capture.capturing():
            self._capture.begin()
            body(replace(context, splitter=self))
            self._pieces.append(self._capture.end())
        return _replay_of(self._pieces, self._mixers, self._rotations)

    def split(
        self, mix: Mixing, ctx: ForwardContext, rotation: Rotation, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        number = self._number_of(rotation)
        self._pieces.append(self._capture.end())
        result = mix(ctx, replace(rotation), *tensors)
        out = self._outputs.like(result).copy_(result)
        borrowed = [self._capture.borrow(tensor) for tensor in tensors]
        self._mixers.append(_Mixer(mix, borrowed, out, number))
        self._capture.begin()
        return out

    def _number_of(self, rotation: Rotation) -> int:
        """Layers with the same RoPE have the same object, which the replay needs as such."""
        for number, known in enumerate(self._rotations):
            if known is rotation:
                return number
        self._rotations.append(rotation)
        return len(self._rotations) - 1


def _replay_of(
    pieces: Sequence[Replay], mixers: Sequence[_Mixer], rotations: Sequence[Rotation]
) -> ReplayPiecewise:
    def replay(ctx: ForwardContext) -> None:
        # Other objects for each step: what they cache is computed from the step's angles.
        angles = [replace(rotation) for rotation in rotations]
        for piece, mixer in zip(pieces[:-1], mixers, strict=True):
            piece()
            mixer.out.copy_(mixer.compute(ctx, angles[mixer.rotation], *mixer.tensors))
        pieces[-1]()

    return replay
