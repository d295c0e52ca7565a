"""DFlash and DSpark: a small decoder drafts a whole block in one pass, from hidden states of the target."""

from dataclasses import replace
from pathlib import Path

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM, DraftModel
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import AuxStates, DecoderLM
from workers.layers.dflash import BlockDraftModel
from workers.layers.dspark import DsparkModel
from workers.layers.quantization.config import resolve
from workers.spec_decode.draft_model import own_context
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import BlockDrafter, relative_cost
from workers.weights.files import tensor_places

_MODELS: dict[str, tuple[type[BlockDraftModel], tuple[str, ...]]] = {
    "dflash": (BlockDraftModel, ("DFlashDraftModel",)),
    "dspark": (DsparkModel, ("Qwen3DSparkModel", "DSparkDraftModel")),
}
"""Of each method: its class, and the architectures that config.json has for it."""


def build_block_drafter(
    own: Checkpoint,
    target: CausalLM,
    build: BuildContext,
    most_tokens: int,
    speculative: SpeculativeConfig,
    with_weights: bool,
) -> BlockDraftModel:
    """The drafter of `target` without its weights; the target keeps hidden states of `most_tokens` for it.

    Raises ValueError for what is not supported.
    """
    flag = f"--method {speculative.method}"
    made, architectures = _MODELS[speculative.method or ""]
    if own.architecture not in architectures:
        raise ValueError(
            f"--draft-model {own.directory} has architecture {own.architecture}; {flag} supports "
            f"{' and '.join(architectures)}"
        )
    if not isinstance(target, DecoderLM):
        raise ValueError(f"{flag}: the model hands out no hidden states; use another method")
    config = {**own.hf_config, **(own.hf_config.get("dflash_config") or {})}
    names = tensor_places(Path(own.directory), {}).keys() if with_weights else set()
    quantization = resolve(own.hf_config, made.packed_modules_mapping, None)
    try:
        model = made(config, target, names, replace(build, quantization=quantization))
    except KeyError as error:
        raise ValueError(f"config.json of {own.directory} lacks {error}") from error
    if (drafts := speculative.num_speculative_tokens) > model.most_drafts:
        raise ValueError(
            f"--num-speculative-tokens {drafts}: the blocks of {own.directory} have at most "
            f"{model.most_drafts} drafts"
        )
    target.model.aux = AuxStates(model.aux_layers, most_tokens, target.model.hidden_size, build)
    return model


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
