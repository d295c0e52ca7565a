"""Captured graphs and compiled models: decode, prompts, piecewise, CPU recordings."""
