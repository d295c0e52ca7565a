"""Models that draft from hidden states of the target model: EAGLE-3 heads, DFlash and DSpark drafters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any

from workers.layers.causal_lm import WeightedModel
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_lm import DecoderLM


class HiddenStatesReader(WeightedModel, ABC):
    """Base of models that draft from the inputs of some of the target's layers."""

    aux_layers: list[int]
    """These layers."""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], target: DecoderLM, names: Set[str], build: BuildContext):
        """`config` is its config.json, which fits the target, and `names` are the tensors of its checkpoint.

        Raises KeyError (missing field) or ValueError (unsupported).
        """
        super().__init__()
