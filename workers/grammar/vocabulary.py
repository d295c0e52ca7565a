"""The vocabulary as xgrammar needs it: the bytes of each id."""

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from atom.config.checkpoint import Checkpoint
from atom.utils.token_pieces import TokenPieces

if TYPE_CHECKING:
    import xgrammar


def tokenizer_info(checkpoint: Checkpoint) -> "xgrammar.TokenizerInfo":
    """The vocabulary of `checkpoint`, which has a tokenizer.

    Special tokens have no bytes, so that no grammar can produce one in the middle of a text.
    """
    import xgrammar

    assert checkpoint.tokenizer_file is not None, "grammars need a tokenizer"
    backend = tokenizers.Tokenizer.from_buffer(Path(checkpoint.tokenizer_file).read_bytes())
    pieces, added = TokenPieces(backend), backend.get_added_tokens_decoder()
    without_text = {i for i, token in added.items() if token.special}.union(checkpoint.eos_token_ids)
    vocabulary = [
        b"" if token_id in without_text else pieces.token_bytes(token_id)
        for token_id in range(checkpoint.vocab_size)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType.RAW,
        vocab_size=checkpoint.vocab_size,
        stop_token_ids=checkpoint.eos_token_ids,
    )
