"""What must be the same on all nodes of a server, and where two nodes differ."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.utils.envs import VARIABLES, Area
from atom.shared.utils.version import atom_version

__all__ = ["difference", "identity_of", "model_identity"]

# Paths, and what each node decides for itself. Models are compared by their files.
_OWN = {
    "model",
    "draft_model",
    "download_dir",
    "revision",
    "served_model_name",
    "cpu_threads",
    "step_trace",
    "torch_profiler_dir",
    "port",
}
_OWN_SERVER = {"host", "server_port", "api_key", "admin_port", "admin_socket", "upgrade_from"}
_OWN_VARIABLES = {"ATOM_CACHE_DIR", "ATOM_DISABLE_MMAP", "ATOM_LOG_MORE", "ATOM_PROFILER_MORE"}
_SAMPLE_BYTES = 1 << 18


def identity_of(config: EngineConfig, checkpoint: Checkpoint, server: ServerConfig | None) -> dict[str, str]:
    """Names and values. `config` is resolved; `server` is None unless each node has frontends."""
    found = {"ATOM": atom_version(), "torch": metadata.version("torch").partition("+")[0]}
    found["--frontend-per-node"] = str(server is not None)
    for concern in fields(config):
        found |= _flags(getattr(config, concern.name), _OWN)
    if server is not None:
        found |= _flags(server, {name for name in _names(server) if name.startswith("ssl_")} | _OWN_SERVER)
        found["--served-model-name"] = str(config.model.served_model_name)
    for name, variable in VARIABLES.items():
        if variable.area in (Area.ENGINE, Area.GPU, Area.ROCM, Area.AITER) and name not in _OWN_VARIABLES:
            found[name] = os.environ.get(name) or str(variable.default_value())
    found["the model"] = f"{checkpoint.architecture} ({checkpoint.dtype})"
    found |= {f"config.json's {key}": str(value) for key, value in checkpoint.hf_config.items()}
    if not config.model.load_dummy:
        found |= dict(_files(Path(checkpoint.directory)))
    if (draft := config.speculative.draft_model) is not None and not config.model.load_dummy:
        found |= {f"--draft-model's {name}": what for name, what in _files(Path(draft))}
    return found


def model_identity(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Names and values on which the tokens and texts of a request depend. `config` is resolved."""
    found = _flags(config.model, _OWN | {"max_model_len", "trust_remote_code"})
    found["the served names"] = ", ".join(config.model.names)
    found["the model"] = f"{checkpoint.architecture} ({checkpoint.dtype})"
    found |= {f"config.json's {key}": str(value) for key, value in checkpoint.hf_config.items()}
    for what, file in (
        ("the tokenizer", checkpoint.tokenizer_file),
        ("the chat template", checkpoint.chat_template_file),
    ):
        if file is not None:
            found[what] = hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    if not config.model.load_dummy:
        found |= dict(_files(Path(checkpoint.directory)))
    return found


def difference(their_name: str, theirs: dict[str, str], our_name: str, ours: dict[str, str]) -> str:
    """The first difference in one line, with both values; empty if there is none."""
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            their_value, our_value = (values.get(name, "nothing") for values in (theirs, ours))
            return f"{name}: {their_name} has {their_value:.200}, {our_name} has {our_value:.200}"
    return ""


def _flags(config: object, own: set[str]) -> dict[str, str]:
    names = (name for name in _names(config) if name not in own)
    return {f"--{name.replace('_', '-')}": str(getattr(config, name)) for name in names}


def _names(config: object) -> list[str]:
    return [field.name for field in fields(config)]  # type: ignore[arg-type]


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    """Each weight file with its size and a hash of its ends: of the header, and of some weights."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            sample = hashlib.blake2b(file.read(_SAMPLE_BYTES), digest_size=8)
            file.seek(max(0, size - _SAMPLE_BYTES))
            sample.update(file.read())
        yield path.name, f"{size} bytes, hash {sample.hexdigest()}"
