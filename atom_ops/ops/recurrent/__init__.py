"""Recurrent layers (gated delta rule, causal convolution) and their states: torch references."""
