"""Which models are served: one."""

import time

from frontend.errors import RequestError
from frontend.input_processor import InputProcessor
from frontend.schemas.models import ModelCard, ModelList

__all__ = ["ModelService"]


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
