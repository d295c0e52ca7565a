"""The bytes that a decode step must read: weights, as they are held, and each request's cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from atom.shared.messages.worker import KVSpec, RecurrentStateSpec, SlidingWindowSpec
from benchmarks.simulation.decoder import expected_experts
from workers.layers.causal_lm import CausalLM
from workers.layers.embedding import VocabEmbedding
from workers.layers.moe.moe import ExpertRouter, Experts
from workers.layers.weighted import WeightedLayer
from workers.weights.plan import weighted_layers

__all__ = ["StepBytes", "step_bytes"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step reads; of a recurrent state, which it also writes, twice its size."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def step_bytes(
    model: CausalLM, specs: Sequence[KVSpec], rows: int, context: int, experts_per_token: int
) -> StepBytes:
    """For a decode batch of `rows` requests with `context` tokens each.

    Of the experts of a layer those count that so many tokens choose if the router spreads them evenly; of an
    embedding the rows that are looked up. A sparse attention is counted as if it read the whole context.
    """
    weights = sum(_layer_bytes(layer, rows, experts_per_token) for _, layer in weighted_layers(model))
    return StepBytes(weights, rows * sum(_cache_bytes(spec, context) for spec in specs))


def _layer_bytes(layer: WeightedLayer, rows: int, experts_per_token: int) -> float:
    held = sum(tensor.nbytes for tensor in layer.held_tensors())
    if isinstance(layer, VocabEmbedding):  # a tied head counts the whole matrix
        return rows * layer.weight[0].nbytes
    if isinstance(layer, Experts):
        experts = len(layer.slot_tensors()[0])
        return held * expected_experts(experts, experts_per_token, rows) / experts
    if isinstance(layer, ExpertRouter) and layer.tid2eid is not None:
        return held - layer.tid2eid.nbytes + rows * layer.tid2eid[0].nbytes
    return held


def _cache_bytes(spec: KVSpec, context: int) -> float:
    """Bytes of one request."""
    if isinstance(spec, RecurrentStateSpec):
        return 2 * spec.bytes_per_slot
    tokens = min(context, spec.window) if isinstance(spec, SlidingWindowSpec) else context
    return tokens * spec.bytes_per_block / spec.block_size
