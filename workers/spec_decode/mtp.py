"""Multi-token prediction: the layer that a checkpoint has for it drafts from the model's hidden states."""

import torch

from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext
from workers.layers.mtp import PredictingModel
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, relative_cost


def mtp_drafter(model: CausalLM) -> Drafter:
    """The drafter of a model that was built with `BuildContext.mtp`. Raises ValueError for other models."""
    if not isinstance(model, PredictingModel) or model.mtp is None:
        raise ValueError("--method mtp: the model has no layer for multi-token prediction; omit the flag")
    return MtpDrafter(model)


class MtpDrafter(Drafter):
    """The layer of a model. Each further draft is predicted by the same layer, from its own output."""

    reads_pairs = True

    def __init__(self, model: PredictingModel):
        self._model = model
        assert model.mtp is not None, "the layer was requested"
        head = model.get_submodule("lm_head")
        self.cost = relative_cost([model.mtp, head], [model.get_submodule("model"), head])
        layer = max(layer for group in model.kv_groups for layer in group.layers)
        self.groups = [number for number, group in enumerate(model.kv_groups) if layer in group.layers]

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        return self._model.predict(
            next_ids_T,
            computed.hidden_TD,
            computed.rope_positions,
            computed.context,
            computed.next_images,
        )

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._model.predict(ids_R, hidden_RD, positions_R, ctx)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self._model.sample_predicted(hidden_RD, settings, positions_R)
