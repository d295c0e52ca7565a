"""Triton kernels of norms, activations, embeddings and the one-shot all-reduce."""
