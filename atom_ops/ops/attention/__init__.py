"""Paged attention, RoPE and the KV cache: torch references."""
