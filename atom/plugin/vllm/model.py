"""The model that vLLM makes in its workers: one of ATOM's families, with its weights, layers and ops."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from atom.plugin.hosted_model import HostedModel
from atom.plugin.vllm.host_attention import HostAttentionContext, use_host_attention
from atom.plugin.vllm.host_config import (
    build_context,
    check_graphs,
    check_supported,
    checkpoint_of,
    online_quantization_of,
)
from atom.plugin.vllm.inner_model import inner_model
from atom.plugin.vllm.step_context import OwnAttentionContext
from atom.shared.utils import envs
from atom_ops.attention_backend import ATTENTION_BACKENDS

logger = init_logger("vllm.plugins.atom")


class AtomForCausalLM(nn.Module):
    """Any of ATOM's model families, as vLLM's runner and weight loader call it.

    The text model of a larger one, for images as an example, is vLLM's own.
    """

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        """ATOM's model, or vLLM's if `prefix` is its name within a larger one."""
        return inner_model(vllm_config, prefix) if prefix else super().__new__(cls)

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Build this rank's model without its weights. Raises ValueError for what is not supported."""
        super().__init__()
        check_supported(vllm_config)
        # vLLM builds models with their device as torch's default.
        device = torch.empty(0).device
        own_attention = not envs.ATOM_DISABLE_VLLM_PLUGIN_ATTENTION
        if own_attention:
            check_graphs(vllm_config)
        hosted = HostedModel(
            checkpoint_of(vllm_config.model_config),
            build_context(vllm_config, device),
            online_quantization_of(vllm_config),
            attention=[] if own_attention else [use_host_attention()],
            # vLLM's cache has the layout of the ops, not that of another attention backend.
            without_attention=ATTENTION_BACKENDS if own_attention else (),
        )
        self._load_format = vllm_config.load_config.load_format
        if self._load_format == "dummy":
            hosted.load_dummy()
        # Not a submodule: vLLM initialises, converts and counts the tensors of all modules that it sees.
        self._atom = (hosted.model,)
        self._hosted = hosted
        make = OwnAttentionContext if own_attention else HostAttentionContext
        self._attention = make(hosted.model, vllm_config, device)
        self.attention_layers = nn.ModuleList(self._attention.layers)
        if get_tp_group().rank_in_group == 0:
            logger.info("%s", hosted.described())
        for line in hosted.warnings():
            logger.warning("%s", line)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Raises ValueError: ATOM's models start from token ids."""
        raise ValueError(
            "ATOM's models in vLLM take token ids alone: embeddings of a prompt are not supported"
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states [T, D] of the step's tokens, padding included."""
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise ValueError("ATOM's models in vLLM take token ids alone, and have all layers on each rank")
        if not self._hosted.loaded:
            raise ValueError(
                f"--load-format {self._load_format} does not give weights to ATOM's models: use auto, or set "
                "ATOM_DISABLE_VLLM_PLUGIN=1"
            )
        (model,) = self._atom
        hidden_TD: torch.Tensor = model(input_ids.long(), positions, self._attention.step(len(input_ids)))
        return hidden_TD

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] over the whole vocabulary, on every rank."""
        return self._atom[0].compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load this rank's shards from vLLM's iterator. Raises WeightError for a tensor that does not fit."""
        self._hosted.load(weights)
        logger.info("%s", self._hosted.described_weights())
        return {name for name, _ in self.named_parameters()}
