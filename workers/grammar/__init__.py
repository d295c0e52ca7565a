"""Structured output: grammars are compiled in a process of their own, and mask the logits of rows."""
