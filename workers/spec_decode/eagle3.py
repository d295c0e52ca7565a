"""EAGLE-3: a head of one layer drafts from hidden states of the target at several depths."""

from dataclasses import replace
from pathlib import Path

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM, DraftModel
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import AuxStates, DecoderLM
from workers.layers.eagle3 import Eagle3Head
from workers.layers.quantization.config import resolve
from workers.spec_decode.draft_model import own_context
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, relative_cost
from workers.weights.files import tensor_places

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def build_head(
    own: Checkpoint, target: CausalLM, build: BuildContext, most_tokens: int, with_weights: bool
) -> Eagle3Head:
    """The head of `target` without its weights; the target keeps the hidden states of `most_tokens` for it.

    Raises ValueError for what is not supported.
    """
    if own.architecture not in _ARCHITECTURES:
        known = " and ".join(_ARCHITECTURES)
        raise ValueError(
            f"--draft-model {own.directory} has architecture {own.architecture}; --method eagle3 supports "
            f"{known}"
        )
    if not isinstance(target, DecoderLM):
        raise ValueError("--method eagle3: the model hands out no hidden states; use another method")
    names = tensor_places(Path(own.directory), {}).keys() if with_weights else set()
    try:
        head = Eagle3Head(own.hf_config, target, names, _quantized(own, build))
    except KeyError as error:
        raise ValueError(f"config.json of {own.directory} lacks {error}") from error
    target.model.aux = AuxStates(head.aux_layers, most_tokens, target.model.hidden_size, build)
    return head


def _quantized(own: Checkpoint, build: BuildContext) -> BuildContext:
    return replace(build, quantization=resolve(own.hf_config, Eagle3Head.packed_modules_mapping, None))


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
