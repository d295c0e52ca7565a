"""One layer of a decoder.

T tokens, D hidden.
"""

from dataclasses import asdict
from typing import Any, cast

import torch
from torch import nn

from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder.blocks import FeedForward, TokenMixer
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.norm import RMSNorm, add_norms


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block, each added to the residual stream."""

    mlp: FeedForward

    def __init__(self, args: DecoderArgs, attention: TokenMixer, mlp: FeedForward, build: BuildContext):
        super().__init__()
        self.norm_names = args.norms
        setattr(self, attention.name_on_disk, attention)
        self._token_mixer = attention.name_on_disk
        self.mlp = mlp
        for name in filter(None, asdict(args.norms).values()):
            self.add_module(name, hidden_norm(args, build))

    @property
    def token_mixer(self) -> TokenMixer:
        """The module that checkpoints name by its kind, such as `self_attn`."""
        return cast(TokenMixer, getattr(self, self._token_mixer))

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm of that name in the checkpoint."""
        return None if name is None else cast(RMSNorm, getattr(self, name))

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm of its output, before the caller adds it to the residual."""
        return self.norm(self.norm_names.after_mlp)

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
        keep_TD: torch.Tensor | None = None,
        x_norm: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the MLP, residual), which the caller adds, after `last_norm` of the output.

        `x_norm` is `last_norm` of the layer that returned `x_TD`. `keep_TD` gets the sum of the inputs.
        """
        names = self.norm_names
        norm = self.norm(names.before_attention)
        out_TD, residual_TD = _after_norms(self.token_mixer, x_norm, norm, x_TD, residual_TD, rotation, ctx)
        if keep_TD is not None:
            keep_TD.copy_(residual_TD)  # later norms may add to the residual in place
        x_norm, norm = self.norm(names.after_attention), self.norm(names.before_mlp)
        return _after_norms(self.mlp, x_norm, norm, out_TD, residual_TD)


def _after_norms(
    block: Any,
    x_norm: RMSNorm | None,
    norm: RMSNorm | None,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of a token mixer or MLP for norm(total), total); see `add_norms`."""
    if x_norm is None and norm is not None:
        fused: tuple[torch.Tensor, torch.Tensor] = block.after_norm(norm, x_TD, residual_TD, *others)
        return fused
    normed_TD, total_TD = add_norms(x_norm, norm, x_TD, residual_TD)
    return block(normed_TD, *others), total_TD


def hidden_norm(args: DecoderArgs, build: BuildContext, scale: float = 1.0) -> RMSNorm:
    """A norm of the hidden states; `scale` is a factor of its output."""
    return RMSNorm(args.hidden_size, args.rms_norm_eps, build, args.zero_centred_norms, scale)
