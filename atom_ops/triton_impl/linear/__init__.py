"""Triton kernels of linear layers with 16-bit and 32-bit weights."""
