"""Triton kernels of routing and mixture-of-experts layers."""
