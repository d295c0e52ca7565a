"""A family's model inside a host: the ops of its device, its layers, and weights that the host reads."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.online_quantization import OnlineQuantization
from atom.shared.utils import envs
from atom_ops import backend
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.models.registry import build_model
from workers.providers import separated_ops
from workers.weights.loader import describe_weights, load_dummy, load_weights


class HostedModel:
    """One of ATOM's models. Not a module: a host initialises, converts and counts the tensors of modules."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        context: BuildContext,
        online: OnlineQuantization | None,
        attention: Sequence[str] = (),
        without_attention: Collection[str] = (),
    ):
        """Build this rank's model without weights. Raises ValueError for what is not supported.

        `attention` are attention backends before the device's own, of which `without_attention` are left out.
        """
        quantized = online is not None or checkpoint.hf_config.get("quantization_config") is not None
        resolved = backend.resolve(
            context.device,
            preferred=[*attention, *(["aiter_triton"] if envs.ATOM_USE_TRITON_GEMM else [])],
            separated=separated_ops(checkpoint, quantized),
            without_attention=without_attention,
        )
        with _own_default_dtype():
            self.model: CausalLM = build_model(checkpoint, context, online)
        self._device = context.device
        self._ops = backend.summary(resolved)
        self.loaded = False

    def load_dummy(self) -> None:
        """Fill the weights with random numbers."""
        with _own_default_dtype():
            load_dummy(self.model, lambda done, total: None)
        self.loaded = True

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's shards from a host's iterator. Raises WeightError for one that does not fit."""
        if self.loaded:
            raise ValueError("ATOM's models in a host load their weights once: start it again for others")
        with _own_default_dtype():
            load_weights(self.model, weights, lambda done, total: None)
        self.loaded = True

    def described(self) -> str:
        """The model and its ops, for the log."""
        return f"ATOM's {type(self.model).__name__}; ops on {self._device}: {self._ops}"

    def described_weights(self) -> str:
        """The weights, for the log."""
        return f"ATOM's weights on this rank: {describe_weights(self.model)}"

    def warnings(self) -> list[str]:
        """Lines about kernels that the device lacks."""
        return list(backend.warnings(self._device))


@contextlib.contextmanager
def _own_default_dtype() -> Iterator[None]:
    """Hosts build models with the compute dtype as torch's default, ATOM's layers name theirs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
