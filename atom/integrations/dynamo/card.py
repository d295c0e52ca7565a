"""The files of a model that Dynamo's frontend reads, in a directory: those of transformers' checkpoints.

Dynamo takes workers for the same model only if its files lie at the same path. So the directory is named by
its content, and machines must have the same ATOM_CACHE_DIR.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint


def write_card(checkpoint: Checkpoint, cache: Path) -> Path:
    """Write config, tokenizer, chat template and end-of-sequence ids of any checkpoint, GGUF included.

    Returns a directory in `cache`, which other workers may write at the same time. Raises ValueError for a
    model without a tokenizer: Dynamo's frontend needs one.
    """
    files = _files(checkpoint)
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    card = cache / digest.hexdigest()[:32]
    card.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in files.items():
        if not (card / name).exists():
            with tempfile.NamedTemporaryFile(dir=card, delete=False) as file:
                file.write(content)
            os.replace(file.name, card / name)
    return card


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    if checkpoint.tokenizer_file is None:
        raise ValueError(f"{checkpoint.directory} has no tokenizer, and Dynamo's frontend needs one")
    tokenizer = {**checkpoint.template_tokens, "model_max_length": checkpoint.max_model_len}
    if checkpoint.chat_template_file is not None:
        tokenizer["chat_template"] = Path(checkpoint.chat_template_file).read_text(encoding="utf-8")
    eos = {"eos_token_id": checkpoint.eos_token_ids}
    return {
        "config.json": _json({**checkpoint.hf_config, **eos}),
        "generation_config.json": _json(eos),
        "tokenizer.json": Path(checkpoint.tokenizer_file).read_bytes(),
        "tokenizer_config.json": _json(tokenizer),
    }


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode()
