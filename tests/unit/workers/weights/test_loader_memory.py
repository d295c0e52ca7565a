"""Loading allocates little memory in addition to the weights, whatever form the checkpoint has.

Allocated bytes are counted, not resident pages, so that the result does not depend on the allocator.
float32 weights are packed on every CPU, bfloat16 weights only on some.
"""

from pathlib import Path

import pytest
import torch

from tests.helpers.engine.load_memory import FEATURES, HIDDEN, MB, VOCAB, allocated, build, write
from workers.weights import loader

LAYERS = 2
SHARD_BYTES = 20 * MB
SMALL = MB
"""RoPE tables, file headers, tensor names."""


def _additional(kind: str, dtype: torch.dtype) -> int:
    """Bytes needed in addition: of the largest layer that is packed, or of what is read at once."""
    if kind == "dense":
        return VOCAB * HIDDEN * dtype.itemsize
    matrix = FEATURES * HIDDEN
    # MXFP4: gate and up of one expert as stored, and a contiguous copy of one of them.
    return matrix * 3 // 2 if kind == "mxfp4" else matrix * dtype.itemsize


@pytest.mark.parametrize(
    ("kind", "dtype", "mapped"),
    [
        ("dense", torch.bfloat16, False),
        ("dense", torch.float32, False),
        ("dense", torch.float32, True),
        ("experts", torch.bfloat16, False),
        ("experts", torch.bfloat16, True),
        ("mxfp4", torch.bfloat16, False),
    ],
)
def test_loading_holds_one_layer_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, mapped: bool
) -> None:
    write(kind, LAYERS, tmp_path, SHARD_BYTES)
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(files) >= 2
    monkeypatch.setenv("ATOM_DISABLE_MMAP", str(int(not mapped)))
    found = allocated(kind, LAYERS, tmp_path, dtype)
    # All weights are allocated before they are packed, which may halve them; pages become resident later.
    before = max(loader.weight_bytes(build(kind, LAYERS, "meta", dtype)), found.weights)
    assert before > 4 * _additional(kind, dtype)
    # The mapping of a file counts as allocated.
    assert found.peak - before <= _additional(kind, dtype) + (max(files) if mapped else 0) + SMALL
    assert found.python_peak <= SMALL


def test_online_quantization_holds_one_plain_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file has it, and a million of its numbers a few times in float32."""
    write("online", 3, tmp_path, SHARD_BYTES)
    monkeypatch.setenv("ATOM_DISABLE_MMAP", "1")
    found = allocated("online", 3, tmp_path, torch.bfloat16)
    assert found.peak - found.weights <= 4096 * HIDDEN * 2 + 16 * MB
    assert found.peak < 0.8 * sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_freed_memory_is_returned_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it glibc would keep weights that were replaced by packed ones until the end of loading."""
    calls: list[None] = []
    trim_bytes = 8 * MB
    monkeypatch.setattr(loader, "_TRIM_BYTES", trim_bytes)
    monkeypatch.setattr(loader, "_return_freed_memory", lambda: calls.append(None))
    model = build("dense", LAYERS, "cpu")
    weights = loader.weight_bytes(model)
    loader.load_dummy(model, lambda done, total: None)
    assert weights <= len(calls) * (trim_bytes + _additional("dense", torch.bfloat16))
