"""EAGLE-3: a head of one layer drafts from hidden states of the target at several depths."""

import torch

from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM, DraftModel
from workers.layers.context import ForwardContext
from workers.layers.decoder.aux_states import AuxStates
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.eagle3 import Eagle3Head
from workers.spec_decode.draft_model import own_context
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, relative_cost


def eagle3_drafter(model: CausalLM) -> Drafter:
    """The drafter of a model to which a head was attached."""
    assert model.draft is not None and isinstance(model, DecoderLM), "they are built together"
    aux = model.model.aux
    assert aux is not None, "the head sets it"
    return Eagle3Drafter(model.draft, aux, relative_cost([model.draft.model], [model]))


class Eagle3Drafter(Drafter):
    """The head computes pairs of the target's hidden states and the next ids, then its own outputs."""

    reads_pairs = True

    def __init__(self, draft: DraftModel, aux: AuxStates, cost: float):
        assert isinstance(draft.model, Eagle3Head)
        self._draft = draft
        self._head = draft.model
        self._aux = aux
        self.cost = cost
        self.groups = [draft.first_group]

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        hidden_TD = self._head.combine(self._aux.states_TF[: len(next_ids_T)])
        return self.predict(next_ids_T, hidden_TD, computed.positions_T, computed.context)

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        own = own_context(self._draft, ctx)
        found_RD: torch.Tensor = self._head(ids_R, hidden_RD, positions_R, own)
        return found_RD

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self._head.sample(hidden_RD, settings, positions_R)
