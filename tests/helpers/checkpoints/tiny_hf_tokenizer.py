"""The tiny tokenizer as a directory that transformers reads."""

import json
from pathlib import Path

from tests.helpers.checkpoints import tiny_tokenizer


def write(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer.build().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny_tokenizer.BOS,
        "eos_token": tiny_tokenizer.EOS,
        "chat_template": tiny_tokenizer.TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
