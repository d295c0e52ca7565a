"""The features of images on one rank, computed once for all requests with the same image."""

import numpy as np
import torch

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import LoadImage
from atom_ops import to_device
from workers.vision.tower import Normalisation, Pixels, VisionTower

_BYTES_ON_CPU = 256 << 20
_BYTES_ON_GPU = 1 << 30


class ImageStore:
    """Holds what the core has asked for; the core counts the tokens and says what is dropped."""

    def __init__(self, tower: VisionTower, settings: ImageSettings, hidden_size: int, device: torch.device):
        self._tower = tower
        self.settings = settings
        """How images are read."""
        self._device = device
        self._normalised = Normalisation(settings.scale, settings.mean, settings.std, device)
        self._features: dict[bytes, torch.Tensor] = {}
        weight = next(tower.buffers())
        token_bytes = tower.num_levels * hidden_size * weight.element_size()
        most = _BYTES_ON_CPU if device.type == "cpu" else _BYTES_ON_GPU
        self.max_tokens = max(most // token_bytes, settings.max_tokens)
        """Tokens of all images that it may hold; those of the largest image fit."""
        self.max_bytes = self.max_tokens * token_bytes

    @torch.inference_mode()
    def load(self, message: LoadImage) -> None:
        """Launch the tower on an image. Raises torch.OutOfMemoryError."""
        self._features[message.key] = self._encode(message.rows, message.columns, message.pixels)

    def drop(self, key: bytes) -> None:
        """Forget an image."""
        del self._features[key]

    def features(self, key: bytes) -> torch.Tensor:
        """[tokens, L, D]. Raises KeyError for an image that is not held."""
        return self._features[key]

    def encode_largest(self) -> None:
        """Encode an image of the most tokens, to measure the memory that this takes."""
        tokens = self.settings.max_tokens
        with torch.inference_mode():
            self._encode(1, tokens, bytes(tokens * self.settings.token_bytes))

    def _encode(self, rows: int, columns: int, pixels: bytes) -> torch.Tensor:
        merge = self.settings.merge
        patches_PF = np.frombuffer(bytearray(pixels), np.uint8).reshape(-1, self.settings.patch_bytes)
        image = Pixels(to_device(patches_PF, self._device), (rows * merge, columns * merge))
        features_NLD: torch.Tensor = self._tower(image, self._normalised)
        return features_NLD
