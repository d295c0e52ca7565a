"""The model that SGLang makes in its workers: one of ATOM's families, with its weights, layers and ops."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn

from atom.plugin.hosted_model import HostedModel
from atom.plugin.sglang.host_config import (
    build_context,
    check_supported,
    checkpoint_of,
    query_heads,
    server_args,
)
from atom.plugin.sglang.radix_layers import RadixLayers, use_radix_attention
from workers.layers.attention.attention import KVGroup
from workers.layers.causal_lm import CausalLM

logger = logging.getLogger("sglang.srt.plugins.atom")


class _LMHead:
    """The LM head as SGLang's logits processor knows quantized ones."""

    def __init__(self, model: CausalLM):
        self._model = model
        self.quant_method = self

    def apply(self, layer: Any, hidden_RD: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] over the whole vocabulary, on every rank."""
        return self._model.compute_logits(hidden_RD)


class AtomForCausalLM(nn.Module):
    """Any of ATOM's model families, as SGLang's runner and weight loader call it."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        """Build this rank's model without its weights. Raises ValueError for what is not supported.

        `quant_config` is SGLang's; ATOM reads the checkpoint's own.
        """
        super().__init__()
        args = server_args()
        check_supported(args, prefix)
        self.config = config
        # SGLang builds models with their device as torch's default.
        device = torch.empty(0).device
        checkpoint = checkpoint_of(config, type(self).__name__)
        context = build_context(checkpoint, device)
        hosted = HostedModel(checkpoint, context, None, attention=[use_radix_attention()])
        if args.load_format == "dummy":
            hosted.load_dummy()
        # Not a submodule: SGLang converts and counts the tensors of all modules that it sees.
        self._hosted = hosted
        self._lm_head = _LMHead(hosted.model)
        self._attention = RadixLayers(hosted.model, query_heads(checkpoint, context), device)
        self.attention_layers = self._attention.layers
        self.logits_processor = LogitsProcessor(config, skip_all_gather=True)
        if context.tp.rank == 0:
            logger.info("%s", hosted.described())
        for line in hosted.warnings():
            logger.warning("%s", line)

    def get_attention_sliding_window_size(self) -> int | None:
        """The longest window in tokens before the current one; None: all layers see everything."""
        windows = [group.window for group in self._hosted.model.kv_groups if isinstance(group, KVGroup)]
        return max(windows, default=0) - 1 if any(windows) else None

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **more: Any
    ) -> Any:
        """SGLang's LogitsProcessorOutput for the step's tokens."""
        if given := [name for name, value in more.items() if value is not None]:
            raise ValueError(f"ATOM's models in SGLang take token ids alone, without {', '.join(given)}")
        if not self._hosted.loaded:
            raise ValueError(
                f"--load-format {server_args().load_format} does not give weights to ATOM's models: use "
                "auto, or set ATOM_DISABLE_SGLANG_PLUGIN=1"
            )
        hidden_TD = self._hosted.model(input_ids.long(), positions, self._attention.step(forward_batch))
        return self.logits_processor(input_ids, hidden_TD, self._lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's shards from SGLang's iterator. Raises WeightError for one that does not fit."""
        self._hosted.load(weights)
        logger.info("%s", self._hosted.described_weights())
