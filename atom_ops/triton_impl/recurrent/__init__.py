"""Triton kernels of the gated delta rule and causal convolution."""
