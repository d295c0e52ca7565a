"""Packed forms of weights."""
