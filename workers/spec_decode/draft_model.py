"""A second model of the same vocabulary drafts; its KV groups follow those of the target."""

from dataclasses import replace

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom_ops import SamplingBatch, StatePart, StatePlan
from workers.layers.attention.cache_groups import CacheGroup, LatentGroup
from workers.layers.causal_lm import CausalLM, DraftModel, WeightedModel
from workers.layers.context import ForwardContext, GroupContext
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, relative_cost


def attach(model: CausalLM, draft: WeightedModel, checkpoint: Checkpoint) -> None:
    """Make `draft`, built from `checkpoint`, the draft model of `model`, which gets its KV groups."""
    first_layer = 1 + max(layer for group in model.kv_groups for layer in group.layers)
    model.draft = DraftModel(draft, checkpoint.directory, len(model.kv_groups), first_layer)
    model.kv_groups = [*model.kv_groups, *(_moved(group, first_layer) for group in draft.kv_groups)]


def _moved(group: CacheGroup, by: int) -> CacheGroup:
    layers = [layer + by for layer in group.layers]
    if isinstance(group, LatentGroup):
        return replace(group, layers=layers, indexed=[layer + by for layer in group.indexed])
    return replace(group, layers=layers)


def own_context(draft: DraftModel, ctx: ForwardContext) -> ForwardContext:
    """The part of a step's context that the draft model reads.

    Its plans are new ones: what backends derive from a plan has to be computed in the graph that uses it, and
    the target's pass, which is another graph, does not read these groups.
    """
    groups = [_with_new_plan(group) for group in ctx.groups[draft.first_group :]]
    return ForwardContext(ctx.kv_layers[draft.first_layer :], groups)


def _with_new_plan(group: GroupContext | StatePlan) -> GroupContext | StatePlan:
    if isinstance(group, GroupContext):
        return GroupContext(group.slots_T, replace(group.plan))
    if group.parts is None:
        return replace(group)
    return replace(group, parts=[StatePart(part.tokens_P, replace(part.plan)) for part in group.parts])


def draft_model_drafter(model: CausalLM) -> Drafter:
    """The drafter of a model to which a draft model was attached."""
    assert model.draft is not None, "it is attached when the model is built"
    cost = relative_cost([model.draft.model], [model])
    return DraftModelDrafter(model.draft, len(model.kv_groups), cost)


class DraftModelDrafter(Drafter):
    """Any model: it computes the step's tokens, then the last id and its own drafts."""

    reads_pairs = False

    def __init__(self, draft: DraftModel, num_groups: int, cost: float):
        """`num_groups` are those of the step."""
        assert isinstance(draft.model, CausalLM)
        self._draft = draft
        self.cost = cost
        self._model = draft.model
        self.groups = range(draft.first_group, num_groups)

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        return self._compute(computed.ids_T, computed.positions_T, computed.context)

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._compute(ids_R, positions_R, ctx)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self._model.sample(hidden_RD, settings, positions_R)

    def _compute(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden_TD: torch.Tensor = self._model(ids_T, positions_T, own_context(self._draft, ctx))
        return hidden_TD
