"""Which models are served: one."""

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
    """Changes with whatever may change an answer: version, model, and how it runs."""
    parts = msgspec.json.encode([atom_version(), config, checkpoint], order="deterministic")
    return f"fp_{hashlib.sha256(parts).hexdigest()[:12]}"


class ModelService:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, name: str, inputs: InputProcessor):
        self.name = name
        self._inputs = inputs
        self._created = int(time.time())

    def check(self, name: str | None) -> None:
        """Raises RequestError with status 404 for a model that is not served here."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model '{name}' does not exist here; this server has '{self.name}'",
                param="model",
                status=404,
                code="model_not_found",
            )

    def list(self) -> ModelList:
        """All models."""
        card = ModelCard(id=self.name, created=self._created, max_model_len=self._inputs.max_model_len)
        return ModelList(data=[card])

    def get(self, name: str) -> ModelCard:
        """One model by name; RequestError with status 404 for another."""
        self.check(name)
        return self.list().data[0]
