"""Triton kernels of multi-head latent attention, dense and sparse."""
