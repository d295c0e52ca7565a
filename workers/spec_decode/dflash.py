"""DFlash and DSpark: a small decoder drafts a whole block in one pass, from hidden states of the target."""

import torch

from atom_ops import SamplingBatch
from workers.checkpoint.draft_configs import BlockAttention
from workers.layers.causal_lm import CausalLM, DraftModel
from workers.layers.context import ForwardContext
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.dflash import BlockDraftModel
from workers.spec_decode.draft_model import own_context
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import BlockDrafter, BlockView, relative_cost


def block_drafter(model: CausalLM) -> BlockDrafter:
    """The drafter of a model to which a block drafter was attached."""
    assert model.draft is not None and isinstance(model, DecoderLM), "they are built together"
    return HiddenStatesBlockDrafter(model, model.draft)


class HiddenStatesBlockDrafter(BlockDrafter):
    """Caches the target's hidden states, and computes a block of the last id and masks."""

    def __init__(self, target: DecoderLM, draft: DraftModel):
        model = draft.model
        assert isinstance(model, BlockDraftModel)
        assert target.model.aux is not None, "the drafter sets it"
        self._draft = draft
        self._model = model
        self._aux = target.model.aux
        self.mask_id = model.mask_id
        self.first_draft = model.first_draft
        self.groups = range(draft.first_group, draft.first_group + len(model.kv_groups))
        self.views = [*map(_view, model.seen_in_groups)]
        self.draft_cost = relative_cost(model.read_for_each_draft, [target])
        head = [] if model.lm_head is not None else [target.lm_head]
        self.block_cost = relative_cost([model, *head], [target]) - self.draft_cost

    def follow(self, computed: Computed) -> None:
        tokens = len(computed.positions_T)
        own = own_context(self._draft, computed.context)
        self._model.follow(self._aux.states_TF[:tokens], computed.positions_T, own)

    def predict(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden_TD: torch.Tensor = self._model(ids_T, positions_T, own_context(self._draft, ctx))
        return hidden_TD

    def sample(
        self,
        hidden_RKD: torch.Tensor,
        last_ids_R: torch.Tensor,
        settings: SamplingBatch,
        positions_RK: torch.Tensor,
    ) -> torch.Tensor:
        return self._model.sample(hidden_RKD, last_ids_R, settings, positions_RK)


def _view(seen: BlockAttention) -> BlockView:
    if seen.causal:
        return BlockView.CAUSAL
    return BlockView.WHOLE if seen.window is None else BlockView.AHEAD
