"""The name of a cache on disk depends on all that its bytes depend on."""

import dataclasses
import os
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.worker import FullAttentionSpec
from tests.helpers.tiny_models import engine_config
from workers.memory.cache_fingerprint import cache_fingerprint

SPECS = [FullAttentionSpec(4, 100)]


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
