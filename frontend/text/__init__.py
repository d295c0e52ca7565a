"""Text in and out: tokenizer, chat templates, detokenizer, grammars, reply formats."""
