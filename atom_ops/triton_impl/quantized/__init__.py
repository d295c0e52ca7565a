"""Triton kernels of linear layers with quantized weights."""
