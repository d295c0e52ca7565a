"""The served model."""

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.utils.version import atom_version
from frontend.api.models.schema import ModelCard, ModelList, ToolForm
from frontend.errors import RequestError
from frontend.text.input_processor import InputProcessor

__all__ = ["ModelService", "fingerprint"]


def fingerprint(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """A hash of all that may change a response: version, configuration, checkpoint."""
    parts = msgspec.json.encode([atom_version(), config, checkpoint], order="deterministic")
    return f"fp_{hashlib.sha256(parts).hexdigest()[:12]}"


class ModelService:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(
        self,
        names: Sequence[str],
        inputs: InputProcessor,
        tools: ToolForm | None,
        forced_length: float | None = None,
    ):
        """All `names` are the same model; no adapters are served. `forced_length`: see `ModelCard`."""
        self._names = names
        self._tools = tools
        self._forced_length = msgspec.UNSET if forced_length is None else forced_length
        self._inputs = inputs
        self._created = int(time.time())

    @property
    def name(self) -> str:
        """The first of the names."""
        return self._names[0]

    def check(self, name: str | None) -> str:
        """The name for responses. Raises RequestError with status 404 for any other model."""
        if name is not None and name not in self._names:
            known = ", ".join(f"'{each}'" for each in self._names)
            raise RequestError(
                f"the model '{name}' does not exist; this server serves {known}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return name or self.name

    def list(self) -> ModelList:
        """The model under all its names."""
        data = [self.get(name) for name in self._names]
        return ModelList(data=data, first_id=self._names[0], last_id=self._names[-1])

    def get(self, name: str) -> ModelCard:
        """The model `name`. Raises RequestError with status 404 for any other."""
        self.check(name)
        longest = self._inputs.max_model_len
        return ModelCard(
            id=name,
            created=self._created,
            display_name=name,
            created_at=datetime.fromtimestamp(self._created, UTC).isoformat(),
            max_input_tokens=longest,
            max_tokens=longest,
            max_model_len=longest,
            root=self.name,
            tools=self._tools,
            forced_acceptance_length=self._forced_length,
        )
