"""The vocabulary as xgrammar needs it: the bytes of each id."""

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.utils.token_pieces import TokenPieces

if TYPE_CHECKING:
    import xgrammar

SPECIAL_SIGN = "\x1a"
"""Stands in the bytes of special tokens: free text that may not have it has no special token."""
_SPECIAL = b"\xff" + SPECIAL_SIGN.encode()  # no text: it is not UTF-8


def tokenizer_info(checkpoint: Checkpoint) -> "xgrammar.TokenizerInfo":
    """The vocabulary of `checkpoint`, which has a tokenizer.

    The bytes of special tokens stand in no text, so that a grammar has one only where it names its id.
    """
    import xgrammar

    assert checkpoint.tokenizer_file is not None, "grammars need a tokenizer"
    backend = tokenizers.Tokenizer.from_buffer(Path(checkpoint.tokenizer_file).read_bytes())
    pieces = TokenPieces(backend)
    added = backend.get_added_tokens_decoder()
    without_text = {i: _SPECIAL for i, token in added.items() if token.special}
    without_text |= dict.fromkeys(checkpoint.eos_token_ids, b"")
    vocabulary = [
        without_text[i] if i in without_text else pieces.token_bytes(i) for i in range(checkpoint.vocab_size)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType.RAW,
        vocab_size=checkpoint.vocab_size,
        stop_token_ids=checkpoint.eos_token_ids,
    )
