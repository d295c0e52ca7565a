"""The served model."""

import hashlib
import time

import msgspec

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.utils.version import atom_version
from frontend.errors import RequestError
from frontend.input_processor import InputProcessor
from frontend.schemas.models import ModelCard, ModelList

__all__ = ["ModelService", "fingerprint"]


def fingerprint(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """A hash of all that may change a response: version, configuration, checkpoint."""
    parts = msgspec.json.encode([atom_version(), config, checkpoint], order="deterministic")
    return f"fp_{hashlib.sha256(parts).hexdigest()[:12]}"


class ModelService:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, name: str, inputs: InputProcessor):
        self.name = name
        self._inputs = inputs
        self._created = int(time.time())

    def check(self, name: str | None) -> str:
        """The name for responses. Raises RequestError with status 404 for any other model."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model '{name}' does not exist; this server serves '{self.name}'",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self.name

    def list(self) -> ModelList:
        """All models."""
        card = ModelCard(id=self.name, created=self._created, max_model_len=self._inputs.max_model_len)
        return ModelList(data=[card])

    def get(self, name: str) -> ModelCard:
        """The model `name`. Raises RequestError with status 404 for any other."""
        self.check(name)
        return self.list().data[0]
