"""DFlash: a small decoder drafts a whole block in one pass, from hidden states of the target."""

from dataclasses import replace

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM, DraftModel
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import AuxStates, DecoderLM
from workers.layers.dflash import BlockDraftModel
from workers.layers.quantization.config import resolve
from workers.spec_decode.draft_model import own_context
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import BlockDrafter, relative_cost

_ARCHITECTURE = "DFlashDraftModel"


def build_block_drafter(
    own: Checkpoint, target: CausalLM, build: BuildContext, most_tokens: int, num_drafts: int
) -> BlockDraftModel:
    """The drafter of `target` without its weights; the target keeps hidden states of `most_tokens` for it.

    Raises ValueError for what is not supported.
    """
    if own.architecture != _ARCHITECTURE:
        raise ValueError(
            f"--draft-model {own.directory} has architecture {own.architecture}; --method dflash supports "
            f"{_ARCHITECTURE}"
        )
    if not isinstance(target, DecoderLM):
        raise ValueError("--method dflash: the model hands out no hidden states; use another method")
    quantization = resolve(own.hf_config, BlockDraftModel.packed_modules_mapping, None)
    try:
        model = BlockDraftModel(own.hf_config, target, replace(build, quantization=quantization))
    except KeyError as error:
        raise ValueError(f"config.json of {own.directory} lacks {error}") from error
    if num_drafts >= model.block_size:
        raise ValueError(
            f"--num-speculative-tokens {num_drafts}: the blocks of {own.directory} have at most "
            f"{model.block_size - 1} drafts"
        )
    target.model.aux = AuxStates(model.aux_layers, most_tokens, target.model.hidden_size, build)
    return model


def dflash_drafter(model: CausalLM) -> BlockDrafter:
    """The drafter of a model to which a block drafter was attached."""
    assert model.draft is not None and isinstance(model, DecoderLM), "they are built together"
    return DflashDrafter(model, model.draft)


class DflashDrafter(BlockDrafter):
    """Caches the target's hidden states, and computes a block of the last id and masks."""

    def __init__(self, target: DecoderLM, draft: DraftModel):
        assert isinstance(draft.model, BlockDraftModel)
        assert target.model.aux is not None, "the drafter sets it"
        self._target = target
        self._draft = draft
        self._model = draft.model
        self._aux = target.model.aux
        self.mask_id = draft.model.mask_id
        self.groups = range(draft.first_group, draft.first_group + len(draft.model.kv_groups))
        self.block_cost = relative_cost([draft.model, target.lm_head], [target])

    def follow(self, computed: Computed) -> None:
        tokens = len(computed.positions_T)
        own = own_context(self._draft, computed.context)
        self._model.follow(self._aux.states_TF[:tokens], computed.positions_T, own)

    def predict(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden_TD: torch.Tensor = self._model(ids_T, positions_T, own_context(self._draft, ctx))
        return hidden_TD

    def sample(
        self, hidden_SD: torch.Tensor, settings: SamplingBatch, positions_S: torch.Tensor
    ) -> torch.Tensor:
        return self._target.sample(hidden_SD, settings, positions_S)
