"""Triton kernels of paged attention, RoPE and the KV cache."""
