"""A byte-level tokenizer and a checkpoint around it, made on the spot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from atom.shared.config.checkpoint import Checkpoint
from frontend.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Wie geht es Ihnen? Ça va très bien, merci. 你好，世界。今天天气很好。",
    "one two three four five six seven eight nine ten",
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}"
    "{{ raise_exception('no such role here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build(tags: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Every byte is a token, so that any text can be encoded and split inside characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[BOS, EOS, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def tokenizer() -> Tokenizer:
    return Tokenizer(build())


def checkpoint(
    directory: Path, tags: Sequence[str] = (), texts: Sequence[str] = (), **changes: Any
) -> Checkpoint:
    """A checkpoint whose tokenizer and template lie in `directory`.

    `tags` are further special tokens, `texts` further added tokens that are not special.
    """
    backend = build(tags)
    backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in texts])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    fields: dict[str, Any] = {
        "directory": str(directory),
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "hf_config": {},
        "dtype": "float32",
        "vocab_size": backend.get_vocab_size(),
        "max_model_len": 2048,
        "eos_token_ids": [backend.token_to_id(EOS)],
        "tokenizer_file": str(directory / "tokenizer.json"),
        "chat_template_file": str(directory / "chat_template.jinja"),
        "template_tokens": {"bos_token": BOS, "eos_token": EOS},
    }
    return Checkpoint(**(fields | changes))
