"""Quantization schemes."""
