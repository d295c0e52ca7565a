"""Attention layers, RoPE and windows."""
