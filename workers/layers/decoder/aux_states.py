"""Hidden states that a model keeps for one that drafts.

T tokens, D hidden, F features of the layers side by side.
"""

from collections.abc import Sequence

import torch

from workers.layers.context import BuildContext


class AuxStates:
    """The inputs of some layers, kept for a model that drafts until the next pass overwrites them."""

    def __init__(self, layers: Sequence[int], most_tokens: int, hidden_size: int, build: BuildContext):
        self._places = {layer: place for place, layer in enumerate(layers)}
        width = len(layers) * hidden_size
        self.states_TF = torch.zeros(most_tokens, width, dtype=build.dtype, device=build.device)
        """Side by side, in the order of `layers`; [most_tokens, F]."""
        self._hidden_size = hidden_size

    def part(self, layer: int, tokens: int) -> torch.Tensor | None:
        """Where a layer's inputs are kept, [tokens, D]; None if they are not."""
        place = self._places.get(layer)
        if place is None:
            return None
        return self.states_TF[:tokens].narrow(1, place * self._hidden_size, self._hidden_size)
