"""Multi-token prediction of the Qwen3-Next families: a layer with full attention, in modules mtp.*.

    hidden state of token i ─ pre_fc_norm_hidden ────────┐
                                                         ├─ fc ─ layers.0 ─ norm ─ LM head ► token i + 2
    embedding of token i + 1 ─ pre_fc_norm_embedding ────┘

Otherwise as in `workers.layers.mtp`. T tokens, D hidden.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.decoder.decoder_layer import DecoderLayer
from workers.layers.linear import ReplicatedLinear
from workers.layers.mtp import PredictingLM, PredictionParts
from workers.layers.norm import RMSNorm


class DeltaPrediction(nn.Module):
    """The modules of the checkpoint."""

    def __init__(self, args: DecoderArgs, layer: DecoderLayer, build: BuildContext):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms)

        self.pre_fc_norm_embedding = norm()
        self.pre_fc_norm_hidden = norm()
        self.fc = ReplicatedLinear(2 * args.hidden_size, args.hidden_size, build)
        self.layers = nn.ModuleList([layer])
        self.norm = norm()

    @property
    def layer(self) -> DecoderLayer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer


class PredictingDeltaLM(PredictingLM):
    """Base of the classes in model files."""

    mtp: DeltaPrediction | None

    def __init__(
        self,
        config: Mapping[str, Any],
        args: DecoderArgs,
        build: BuildContext,
        mlp: Callable[[int, BuildContext], FeedForward],
        token_mixers: TokenMixers,
    ):
        """Raises ValueError for an embedding of its own."""
        super().__init__(config, args, build, mlp, token_mixers)
        self.mtp = None
        if not args.mtp_layers:
            self.unused_on_disk += ("mtp.*",)
            return
        if config.get("mtp_use_dedicated_embeddings"):
            raise ValueError("--method mtp: mtp_use_dedicated_embeddings is not supported; omit the flag")
        number = args.num_hidden_layers
        at = build.at("mtp.layers.0")
        layer = DecoderLayer(args, token_mixers.make(number, at), mlp(number, at.at("mlp")), build)
        self.mtp = DeltaPrediction(args, layer, build)

    @property
    def _parts(self) -> PredictionParts:
        mtp = self.mtp
        assert mtp is not None, "it was not requested"
        return PredictionParts(mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.layer, mtp.norm)
