"""Triton kernels of logits processors, sampling, drafting and verification."""
