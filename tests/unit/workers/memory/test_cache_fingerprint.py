"""The name of a cache on disk depends on all that its bytes depend on."""

import dataclasses
import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.worker import FullAttentionSpec
from tests.helpers.checkpoints.tiny_models import engine_config
from workers.memory import cache_fingerprint as cache_fingerprint_module
from workers.memory.cache_fingerprint import cache_fingerprint

SPECS = [FullAttentionSpec(4, 100)]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))


def test_every_difference_gives_another_name(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    checkpoint = Checkpoint(str(tmp_path), "LlamaForCausalLM", "llama", {"a": 1}, "float32", 10, 64)
    config = engine_config()
    names = [
        cache_fingerprint(config, checkpoint, list(SPECS), ["float32 [4, 2]"]),
        cache_fingerprint(engine_config(tp=2), checkpoint, list(SPECS), ["float32 [4, 2]"]),
        cache_fingerprint(engine_config(block_size=8), checkpoint, list(SPECS), ["float32 [4, 2]"]),
        cache_fingerprint(engine_config(kv_cache_dtype="fp8"), checkpoint, list(SPECS), ["float32 [4, 2]"]),
        cache_fingerprint(engine_config(dtype="bfloat16"), checkpoint, list(SPECS), ["float32 [4, 2]"]),
        cache_fingerprint(config, checkpoint, [FullAttentionSpec(4, 101)], ["float32 [4, 2]"]),
        cache_fingerprint(config, checkpoint, list(SPECS), ["float32 [2, 4]"]),
        cache_fingerprint(
            config, dataclasses.replace(checkpoint, hf_config={"a": 2}), list(SPECS), ["float32 [4, 2]"]
        ),
    ]
    os.utime(weights, (1, 1))
    names.append(cache_fingerprint(config, checkpoint, list(SPECS), ["float32 [4, 2]"]))
    weights.write_bytes(b"more weights")
    names.append(cache_fingerprint(config, checkpoint, list(SPECS), ["float32 [4, 2]"]))
    assert len(set(names)) == len(names) and all(len(name) == 32 for name in names)
    assert cache_fingerprint(config, checkpoint, list(SPECS), ["float32 [4, 2]"]) == names[-1]


def test_hosts_with_the_same_weights_have_one_name(tmp_path: Path) -> None:
    """Times of files are not compared, and a hub's cache names its files after what they have."""
    digest = "ab" * 32
    names = []
    for number, content in enumerate((b"weights", b"weights", b"weightS")):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(content)
        os.utime(directory / "model.safetensors", (number, number))
        names.append(named(directory))
    assert names[0] == names[1] != names[2]
    (tmp_path / digest).write_bytes(b"anything")
    for number in range(2):
        path = tmp_path / str(number) / "model.safetensors"
        path.unlink()
        path.symlink_to(tmp_path / digest)
    assert named(tmp_path / "0") == named(tmp_path / "1") not in names


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the names of tiers that hosts share: until a file changes."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    name = named(tmp_path)
    reads = []
    monkeypatch.setattr(cache_fingerprint_module, "xxh3_128", lambda: reads.append(1) or xxh3_128())
    assert named(tmp_path) == name and not reads
    stat = weights.stat()
    weights.write_bytes(b"weightS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert named(tmp_path) != name and len(reads) == 1


def named(directory: Path) -> str:
    checkpoint = Checkpoint(str(directory), "LlamaForCausalLM", "llama", {"a": 1}, "float32", 10, 64)
    return cache_fingerprint(engine_config(), checkpoint, list(SPECS), ["float32 [4, 2]"], by_content=True)
