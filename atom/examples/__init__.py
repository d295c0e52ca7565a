"""Small programs that use `LLMEngine`."""
