"""A name for everything on which the bytes of a cached block depend, besides its tokens."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.worker import KVSpec
from atom.shared.utils import envs
from atom.shared.utils.version import atom_version
from workers.checkpoint.atomic_file import write_atomically

__all__ = ["cache_fingerprint"]

_READ_BYTES = 16 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def cache_fingerprint(
    config: EngineConfig,
    checkpoint: Checkpoint,
    specs: list[KVSpec],
    layers: Iterable[str],
    by_content: bool = False,
) -> str:
    """Hexadecimal digits; equal for two starts whose blocks are the same.

    Of the model it has the configuration, and names, sizes and times of the weight files, or `by_content`,
    their names and checksums: times differ between hosts. `layers` describe the caches of all layers.
    """
    model = config.model
    directory = Path(checkpoint.directory)
    parallel = config.parallel
    parts = {
        "version": atom_version(),
        "model": [model.hf_overrides, model.online_quant_config, model.load_dummy, model.dtype],
        "length": model.max_model_len,
        "cache": [config.cache.block_size, config.cache.kv_cache_dtype],
        "ranks": [parallel.tensor_parallel_size, parallel.decode_context_parallel_size],
        "device": [config.device.device, config.device.batch_invariant],
        "config": checkpoint.hf_config,
        "weights": _contents(directory) if by_content else _times(directory),
        "specs": msgspec.to_builtins(specs),
        "layers": list(layers),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in _WEIGHTS)


def _times(directory: Path) -> list[tuple[str, int, int]]:
    found = [(path.name, path.stat()) for path in _files(directory)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _contents(directory: Path) -> list[tuple[str, str]]:
    return [(path.name, _content(path)) for path in _files(directory)]


def _content(path: Path) -> str:
    """The SHA-256 that a hub's cache names its files after, else XXH3 of the file, which is read once."""
    whole = path.resolve()
    if path.is_symlink() and _SHA256.fullmatch(whole.name):
        return whole.name
    stat = whole.stat()
    state = (str(whole), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
    kept = Path(envs.ATOM_CACHE_DIR, "checksums", key)
    if kept.exists():
        return kept.read_text()
    checksum = xxh3_128()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            checksum.update(part)
    write_atomically(kept, checksum.hexdigest())
    return checksum.hexdigest()
