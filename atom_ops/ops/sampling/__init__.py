"""Logits processors, sampling, drafting and verification: torch references."""
