"""The engine as a library and as a server: arguments, `LLMEngine`, the launcher, progress bars."""
