"""A name for everything on which the bytes of a cached block depend, besides its tokens."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.worker import KVSpec
from atom.shared.utils.version import atom_version

__all__ = ["cache_fingerprint"]

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def cache_fingerprint(
    config: EngineConfig, checkpoint: Checkpoint, specs: list[KVSpec], layers: Iterable[str]
) -> str:
    """Hexadecimal digits; equal for two starts whose blocks are the same.

    Of the model it has the configuration, and names, sizes and times of the weight files. `layers` describe
    the caches of all layers.
    """
    model = config.model
    parallel = config.parallel
    parts = {
        "version": atom_version(),
        "model": [model.hf_overrides, model.online_quant_config, model.load_dummy, model.dtype],
        "length": model.max_model_len,
        "cache": [config.cache.block_size, config.cache.kv_cache_dtype],
        "ranks": [parallel.tensor_parallel_size, parallel.decode_context_parallel_size],
        "device": [config.device.device, config.device.batch_invariant],
        "config": checkpoint.hf_config,
        "weights": _weights(Path(checkpoint.directory)),
        "specs": msgspec.to_builtins(specs),
        "layers": list(layers),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]


def _weights(directory: Path) -> list[tuple[str, int, int]]:
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHTS)
    found = [(path.name, path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
