"""Norms, activations and embeddings: torch references."""
