"""Multi-token prediction: a decoder layer after the last one, which predicts the token after the next.

    hidden state of token i ─ hnorm ─┐
                                     ├─ eh_proj ─ decoder layer ─ shared_head.norm ─ LM head ► token i + 2
    embedding of token i + 1 ─ enorm ┘

Embedding and LM head are the model's. The layer caches the pair (i, i + 1) in the slot of token i. Its output
takes the place of the hidden state where it predicts several tokens, one after another.

T tokens, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from atom_ops import SamplingBatch
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext, ForwardContext, ImageTokens
from workers.layers.decoder.blocks import FeedForward, TokenMixer, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.decoder.decoder_layer import DecoderLayer
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm


class SharedHead(nn.Module):
    """The norm before the model's LM head."""

    def __init__(self, args: DecoderArgs, build: BuildContext):
        super().__init__()
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms)


class PredictionLayer(DecoderLayer):
    """The layer, without embedding and LM head."""

    def __init__(self, args: DecoderArgs, attention: TokenMixer, mlp: FeedForward, build: BuildContext):
        super().__init__(args, attention, mlp, build)
        self.enorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms)
        self.hnorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms)
        self.eh_proj = ReplicatedLinear(2 * args.hidden_size, args.hidden_size, build)
        self.shared_head = SharedHead(args, build)


class PredictionParts(NamedTuple):
    """What predicts: norms of both inputs, their projection, the layer, and the norm before the LM head."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: ReplicatedLinear
    layer: DecoderLayer
    norm: RMSNorm


class PredictingModel(CausalLM, ABC):
    """A model that can predict more tokens after the next one."""

    mtp: nn.Module | None
    """What predicts, without embedding and LM head; None unless `BuildContext.mtp` requests it."""

    @abstractmethod
    def predict(
        self,
        next_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        ctx: ForwardContext,
        images: ImageTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, D] that `sample_predicted` takes, for the tokens after the next ones.

        `hidden_TD` are the model's of the tokens at the RoPE positions `positions_T`, or earlier results of
        this method. `images` are tokens whose next one is in an image, with its features.
        """

    def sample_predicted(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Ids, int64 [R], for hidden states of `predict`."""
        return self.sample(hidden_RD, settings, positions_R)


class PredictingLM(DecoderLM, PredictingModel):
    """A decoder that predicts with one more layer of its kind."""

    @property
    @abstractmethod
    def _parts(self) -> PredictionParts:
        """The modules of `mtp`, which has been requested."""

    def predict(
        self,
        next_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        ctx: ForwardContext,
        images: ImageTokens | None = None,
    ) -> torch.Tensor:
        """As `PredictingModel`; the hidden states are normalised."""
        parts = self._parts
        embedded_TD = parts.embedding_norm(self._embedded_next(next_ids_T, images))
        pair_T2D = torch.cat((embedded_TD, parts.hidden_norm(hidden_TD)), -1)
        rotation = self.model.rotary[0](positions_T)
        x_TD, residual_TD = parts.layer(parts.projection(pair_T2D), None, rotation, ctx)
        normed_TD, _ = parts.norm.add_norm(x_TD, residual_TD)
        return normed_TD

    def _embedded_next(self, next_ids_T: torch.Tensor, images: ImageTokens | None) -> torch.Tensor:
        """What the layer reads of the next tokens, [T, D]."""
        embedded_TD = self.model.embed_tokens(next_ids_T)
        if images is None:
            return embedded_TD
        return embedded_TD.index_copy(0, images.tokens_M, images.features_MLD[:, 0])


class PredictingDecoderLM(PredictingLM):
    """A decoder whose checkpoints have layers for multi-token prediction; the first is built on request.

    `num_nextn_predict_layers` of config.json counts them; their numbers follow the last layer's.
    """

    mtp: PredictionLayer | None

    def __init__(
        self,
        config: Mapping[str, Any],
        args: DecoderArgs,
        build: BuildContext,
        mlp: Callable[[int, BuildContext], FeedForward],
        token_mixers: TokenMixers,
    ):
        """`token_mixers` have groups for `args.cached_layers`."""
        super().__init__(config, args, build, mlp, token_mixers)
        first = args.num_hidden_layers
        layers = range(first, first + (config.get("num_nextn_predict_layers") or 0))
        self.mtp = None
        if not args.mtp_layers:
            self.unused_on_disk += tuple(f"{build.at(f'model.layers.{layer}').prefix}.*" for layer in layers)
            return
        at = build.at(f"model.layers.{first}")
        self.mtp = PredictionLayer(args, token_mixers.make(first, at), mlp(first, at.at("mlp")), build)
        # Of this checkpoint: the class knows no number of layers.
        self.renamed_on_disk = {  # type: ignore[misc]
            **self.renamed_on_disk,
            "mtp": at.prefix,
        }
        self.unused_on_disk += (
            f"{at.prefix}.embed_tokens.*",
            f"{at.prefix}.shared_head.head.*",
        )

    @property
    def _parts(self) -> PredictionParts:
        layer = self.mtp
        assert layer is not None, "the layer was not requested"
        return PredictionParts(layer.enorm, layer.hnorm, layer.eh_proj, layer, layer.shared_head.norm)
