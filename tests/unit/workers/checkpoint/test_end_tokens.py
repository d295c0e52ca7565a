"""End-of-sequence ids: which files state them, and what is used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from workers.checkpoint.prepare import prepare

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
END, TURN = 10, 11


def prepared(
    directory: Path,
    config: object = "absent",
    generation: object = "absent",
    tokenizer: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> Checkpoint:
    def write(name: str, value: object, **settings: Any) -> None:
        content = settings if value == "absent" else settings | {"eos_token_id": value}
        (directory / name).write_text(json.dumps(content))

    write("config.json", config, **CONFIG)
    write("generation_config.json", generation)
    made = Tokenizer(models.BPE({str(number): number for number in range(10)}, []))
    made.add_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_end|>")])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    model = ModelConfig(model=str(directory), load_dummy=True, hf_overrides=json.dumps(overrides or {}))
    return prepare(model, directory / "cache", lambda *progress: None)


@pytest.mark.parametrize(
    ("files", "ids", "num_warnings"),
    [
        ({"config": END, "tokenizer": "<|im_end|>"}, [END, TURN], 1),
        ({"config": END, "generation": [END, TURN], "tokenizer": "<|im_end|>"}, [END, TURN], 0),
        ({"config": END, "generation": TURN, "tokenizer": "<|im_end|>"}, [TURN], 0),
        ({"config": END, "generation": None}, [END], 0),
        ({"config": END, "generation": []}, [END], 0),
        ({"config": None, "tokenizer": "<|im_end|>"}, [TURN], 0),
        ({"config": 99, "tokenizer": "<|im_end|>"}, [TURN], 0),
        ({"config": END, "tokenizer": "5"}, [END, 5], 1),  # of the vocabulary: transformers adds it
        ({}, [], 0),
        ({"config": END, "tokenizer": "<|im_end|>", "overrides": {"eos_token_id": 3}}, [3], 0),
        ({"config": END, "tokenizer": "<|im_end|>", "overrides": {"eos_token_id": None}}, [], 0),
    ],
)
def test_ends_are_those_of_the_files_and_of_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], ids: list[int], num_warnings: int
) -> None:
    checkpoint = prepared(tmp_path, **files)
    assert checkpoint.eos_token_ids == ids
    assert len(checkpoint.warnings) == num_warnings
    if num_warnings:
        assert "config.json ends sequences with the ids 10" in checkpoint.warnings[0]
