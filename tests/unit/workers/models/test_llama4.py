"""Settings of Llama 4 and Gemma 2 that are refused by name, and where chunks begin."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints.tiny_models import save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.layers.attention.attention import KVGroup, group_by_window


def changed(directory: Path, name: str, change: dict[str, Any]) -> None:
    """A saved tiny model with other settings."""
    save_tiny(tiny(name), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported with scaled inputs"),
        ("llama4", {"attention_chunk_size": None}, "chunked_attention, but attention_chunk_size is not set"),
        (
            "llama4",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types must be one of chunked_attention",
        ),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "gemma2 with use_bidirectional_attention"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    changed(tmp_path, name, change)
    with pytest.raises(ValueError, match=words):
        TinyWorker(tmp_path)


def test_layers_with_full_attention_have_no_chunks() -> None:
    assert group_by_window([8, None, 8], 2, 16, chunked=True) == [
        KVGroup([0, 2], 2, 16, 8, chunked=True),
        KVGroup([1], 2, 16),
    ]
